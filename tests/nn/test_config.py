"""A model's config: fields that conflict or have no effect raise one line that names them."""

import jax
import numpy as np
import pytest

from attnlab import config as configs
from attnlab.nn import GPT, AttentionConfig, ModelConfig
from attnlab.nn.config import KINDS
from attnlab.nn.mixers.gated_conv import GatedConvConfig
from attnlab.nn.multihead import LocalConfig
from attnlab.support.errors import UserError
from attnlab.support.options import options

CONV = {"layers": "gated_conv"}
INVALID = [
    ({"gated_delta": {"conv": 2}}, "gated_delta.conv = 2: expected 4, as layers = 'attention' has no "),
    (CONV | {"attention": {"kv_heads": 2}}, "attention.kv_heads = 2: .* has no attention"),
    (CONV | {"attention": {"rotary": {"base": 5.0}}}, "attention.rotary.base = 5.0: .* has no "),
    ({"layers": "gated_delta", "gated_delta": {"conv": -1}}, "gated_delta.conv = -1: expected 0 or more, "),
    ({"layers": "atention"}, "layers = 'atention': no kind 'atention' .did you mean attention"),
    ({"layers": "gru*0 attention"}, r"layers = .*: 'gru\*0': expected KIND\*N, such as gru\*3"),
    ({"layers": " "}, "layers = ' ': expected kinds of layers, "),
    (
        {"attention": {"rotary": {"base": 5.0}}, "positions": "learned"},
        "attention.rotary.base = 5.0: it has no effect with positions = 'learned'",
    ),
    (CONV | {"positions": "rotary"}, "positions = 'rotary': layers of gated_conv do not use them"),
    (CONV | {"positions": "alibi"}, "positions = 'alibi': layers of gated_conv do not use them"),
    ({"mlp": "gated", "mlp_ratio": 0.0}, "mlp = 'gated': it has no effect with mlp_ratio = 0, "),
    (
        {"layers": "gated_delta", "num_heads": 2, "gated_delta": {"value_heads": 3}},
        "gated_delta.value_heads = 3: expected a multiple of num_heads = 2",
    ),
    ({"layers": "mamba2", "mamba2": {"conv": -1}}, "mamba2.conv = -1: expected 0 or more"),
    ({"layers": "conv", "conv": {"kernel_size": 0}}, "conv.kernel_size = 0: expected 1 or more"),
    ({"layers": "retention", "retention": {"key_dim": 3}}, "retention.key_dim = 3: expected an even number"),
    ({"layers": "gla attention", "gla": {"heads": 5}}, "gla.heads = 5: expected a divisor"),
    ({"layers": "differential", "width": 18, "num_heads": 3}, "num_heads = 3: expected an even number"),
    ({"width": 16, "num_heads": 3}, "width = 16: .*num_heads = 3, .*15"),
    ({"positions": "absolute"}, "positions = 'absolute'"),
    ({"attention": {"window": -1}}, "attention.window = -1"),
    ({"num_heads": 4, "attention": {"kv_heads": 3}}, "attention.kv_heads = 3: .*num_heads = 4, .*1"),
    ({"width": 16, "num_heads": 16}, "attention.rotary.fraction = 1.0: rotates 1 of the 1 features of a head"),
    ({"width": 15, "num_heads": 3, "positions": "sinusoidal"}, "width = 15: expected an even width"),
    ({"width": 16, "mlp_ratio": 0.01}, "mlp_ratio = 0.01: .*1/16 .*width = 16"),
    ({"layers": "local attention"}, "local.window = None: expected the positions"),
    ({"attention": {"qk_norm_joint": True, "qk_norm": False}}, "attention.qk_norm_joint = True: .* qk_norm"),
    (
        {"layers": "attention gru", "attention": {"value_residual": True}},
        "attention.value_residual = True: expected in all layers .attention, gru. or in none",
    ),
]
NO_FIELD = [
    ({"layers": "forget", "forget": {"rotary": {}}}, "forget.rotary = {}: no such option"),
    ({"layers": "differential", "differential": {"sinks": True}}, "differential.sinks = True: no such option"),
    ({"vocab_size": 11, "padded_vocab_size": 10}, "padded_vocab_size = 10: expected vocab_size = 11 or more"),
    ({"attention": {"windw": 8}}, "attention.windw = 8: no such option .did you mean window"),
    ({"widht": 8}, "widht = 8: no such option .did you mean width"),
    ({"attention": {"rotary": {"bas": 1.0}}}, "attention.rotary.bas = 1.0: no .*did you mean base"),
    ({"layers": ()}, r"layers = \(\): expected one LayerConfig or more"),
]


@pytest.mark.parametrize("values, message", INVALID + NO_FIELD, ids=str)
def test_invalid_model_option_raises_one_line(values, message):
    with pytest.raises(ValueError, match=f"^{message}") as raised:
        GPT.of(**values)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("values, message", INVALID, ids=str)
def test_invalid_model_option_of_run_raises_the_same_line(values, message):
    with pytest.raises(UserError, match=rf"^config\.model\.{message}"):
        run_of(values)


def flat(values):
    """Values by dotted name."""
    groups = {name: flat(value) if isinstance(value, dict) else {"": value} for name, value in values.items()}
    return {f"{name}.{rest}".rstrip("."): x for name, group in groups.items() for rest, x in group.items()}


def run_of(values):
    """The config of a run with these fields of its model."""
    return configs.RunConfig.of({f"model.{name}": value for name, value in flat(values).items()})


def test_option_without_effect_is_an_error_in_new_runs():
    config = run_of({"attention": {"rotary": {"factor": 4.0}}})
    with pytest.raises(
        UserError, match=r"config.model.attention.rotary.factor = 4.0: it has no effect with scaling = "
    ):
        config.check_effects()


@pytest.mark.parametrize(
    "values",
    [
        {"layers": "gated_conv*2 attention", "attention": {"kv_heads": 2, "rotary": {"base": 5.0}}, "num_heads": 2},
        {"layers": "local attention", "local": {"window": 8, "rotary": {"base": 5.0}}, "attention": {"soft_cap": 5.0}},
        CONV | {"gated_conv": {"kernel_size": 2}, "dropout": 0.1, "use_bias": True, "positions": "learned"},
        CONV | {"width": 129},  # no heads that must divide it
        CONV | {"attention": {"window": None}},  # the default
    ],
    ids=str,
)
def test_run_config_builds_the_model_of_the_same_python_values(values):
    model = ModelConfig.of(**values)
    assert run_of(values).over_tokens(256) == model
    assert configs.RunConfig(model=model).over_tokens(256) == model


def test_layer_words_and_configs_repeat_up_to_num_layers():
    gated, attention = GatedConvConfig(), AttentionConfig(window=8)
    config = ModelConfig.of(layers="gated_conv*2 attention", num_layers=5, attention=attention)
    assert config == ModelConfig.of(layers=(gated, gated, attention), num_layers=5)
    assert [config.layer(number) for number in range(5)] == [gated, gated, attention, gated, gated]
    assert ModelConfig.of(layers=attention).layers == (attention,)
    assert config.replace(num_layers=2).used == (gated,)  # only layers within the model


def test_auto_positions_are_rotary_if_any_layer_supports_them():
    stands_for = {"attention": "rotary", "gated_conv attention": "rotary"}
    stands_for |= dict.fromkeys(("gated_conv", "forget", "stick_breaking"), "none")
    assert {layers: ModelConfig.of(layers=layers).position_encoding for layers in stands_for} == stands_for
    assert ModelConfig.of(layers="gated_conv attention", num_layers=1).position_encoding == "none"


def test_replaced_field_is_checked():
    with pytest.raises(ValueError, match=r"^remat = 'all': expected one of none, "):
        GPT.of().replace(remat="all")


def test_layer_configs_name_their_kind_and_default_every_option():
    for name, kind in KINDS.items():
        defaults = {field: each.default for field, each in options(kind).items() if "." not in field}
        assert kind.kind == name and kind() == kind(**defaults)


def test_local_layers_lower_to_the_program_of_windowed_attention():
    sizes = {"vocab_size": 40, "num_layers": 2, "num_heads": 2, "width": 16, "context": 12}
    tokens = np.arange(24).reshape(2, 12)

    def program(layer):
        model = GPT.of(**sizes, layers=layer)
        return jax.jit(model.apply).lower(jax.eval_shape(model.init, jax.random.key(0), tokens), tokens).as_text()

    assert program(AttentionConfig(window=3)) == program(LocalConfig(window=3))
