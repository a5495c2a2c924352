"""Typed access to the options in a config.json, with errors that name the option."""

import sys
from collections.abc import Mapping
from typing import Any

from attnlab.support.errors import UserError

# Values of `hidden_act` and attnlab's names; if an activation has several values, the first is written.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}

# Options that no model reads: origin, tokens, generation, training, and heads for other tasks.
_METADATA = """
model_type architectures auto_map transformers_version dtype torch_dtype name_or_path tokenizer_class use_cache
initializer_range bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id id2label label2id
problem_type task_specific_params finetuning_task prefix return_dict output_attentions output_hidden_states
chunk_size_feed_forward torchscript attn_implementation cache_implementation n_ctx gradient_checkpointing
summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout num_labels
classifier_dropout is_decoder reorder_and_upcast_attn max_length min_length do_sample early_stopping num_beams
num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences remove_invalid_values
"""
METADATA = frozenset(_METADATA.split())
# Options with the number of extra heads that predict later tokens; the name depends on the family.
_EXTRA_HEADS = ("num_nextn_predict_layers", "num_mtp_layers")
# Other options that some models do not read, with the value that has no effect.
_NEUTRAL = {"pretraining_tp": 1, "position_embedding_type": "absolute", "partial_rotary_factor": 1}


class ConfigReader:
    """Reader of the options in a config.json, or in an object within it; records which options are read.

    Methods that read an option take a default for configs that lack the option; once passed, a default stays in force.
    """

    def __init__(self, options: Mapping[str, Any], name: str, defaults: Mapping[str, Any] = {}):
        self.name = name
        self._options = options
        self._values = {**defaults, **options}
        self._read = set(defaults)
        self._objects = {}

    def get(self, option: str, default: Any = None) -> Any:
        """The value of an option."""
        self._read.add(option)
        return self._values.get(option) if default is None else self._values.setdefault(option, default)

    def within(self, option: str, defaults: Mapping[str, Any] = {}) -> "ConfigReader":
        """A reader of the object in an option; it is empty if the object is missing or null."""
        value = self.get(option)
        if not isinstance(value, Mapping | None):
            raise self.error(option, "an object, or null")
        return self._objects.setdefault(option, ConfigReader(value or {}, f"{self.name}: {option}", defaults))

    def silence(self, options: str) -> None:
        """Count options as read, because they do not change what a model computes."""
        self._read |= set(options.split())

    def ignore(self, option: str) -> None:
        """Forget that an option was read."""
        self._read.discard(option)

    def check_unread(self) -> None:
        """Raise UserError for an unread option that would change what a model computes."""
        for option, value in self._options.items():
            if value and option not in self._read:
                if "experts" in option and "per_tok" not in option:
                    raise self.error(option, "0: a mixture of experts is not supported")
                if option in _EXTRA_HEADS:
                    raise self.error(option, "0: GPT supports no other")

    def unread(self) -> list[str]:
        """Options that were not read, except metadata, private names, and values that turn an option off."""
        effective = [name for name, value in self._options.items() if value and value != _NEUTRAL.get(name)]
        unread = [name for name in effective if name not in self._read | METADATA and not name.startswith("_")]
        return unread + [f"{option}.{name}" for option, options in self._objects.items() for name in options.unread()]

    def error(self, option: str, expected: str) -> UserError:
        """An error that names an option, its value and the expected value."""
        return UserError(f"{self.name}: {option} = {self.get(option)!r} in its config, expected {expected}")

    def integer(self, option: str, default: int | None = None, *, null: int | None = None, high: int = 2**31 - 1):
        """An integer from 1 to `high`; `null` if the option is null."""
        value = null if self.get(option, default) is None else self.get(option)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
            raise self.error(option, f"an integer from 1 to {high}")
        return value

    def optional_integer(self, option: str, default: int | None = None) -> int | None:
        return None if self.get(option, default) is None else self.integer(option)

    def number(self, option: str, default: float | None = None, *, high: float = sys.float_info.max) -> float:
        """A number above 0 and at most `high`."""
        value = self.get(option, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= high:
            raise self.error(option, f"a number above 0, at most {high:g}")
        return float(value)

    def optional_number(self, option: str, default: float | None = None) -> float | None:
        return None if self.get(option, default) is None else self.number(option)

    def number_or_off(self, option: str) -> float | None:
        """A finite number above 0; None for 0 or null."""
        return self.number(option) if self.get(option) else None

    def probability(self, option: str, default: float) -> float:
        """A number in [0, 1)."""
        value = self.get(option, default)
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise self.error(option, "a probability in [0, 1)")
        return float(value)

    def flag(self, option: str, default: bool | None = None) -> bool:
        value = self.get(option, default)
        if not isinstance(value, bool):
            raise self.error(option, "true or false")
        return value

    def activation(self, option: str, default: str) -> str:
        """attnlab's name for an activation."""
        value = self.get(option, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.error(option, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def only(self, **supported) -> None:
        """Raise UserError for an option whose value is not the supported one."""
        for option, value in supported.items():
            if self.get(option) not in (None, value):
                raise self.error(option, f"{value!r}: GPT supports no other")


def activation_name(activation: str, first: str = "") -> str:
    """The name in config.json for an activation of attnlab, preferably `first`."""
    names = [name for name, ours in ACTIVATIONS.items() if ours == activation]
    return first if first in names else names[0]
