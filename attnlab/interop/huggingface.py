"""Convert GPT-2 between Hugging Face's `transformers` (files, folders, model objects) and `attnlab.nn.GPT`.

Reading and writing files needs only `safetensors`; `to_hf` returns torch tensors and needs torch.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data import tokenizers
from attnlab.errors import UserError
from attnlab.interop import tensors
from attnlab.interop.tensors import Tensor
from attnlab.nn import GPT, unstack_layers
from attnlab.nn.gpt import check_shape

__all__ = ["from_hf", "save_hf", "to_hf"]

# `activation_function` in config.json; of several names for one activation, the first is written.
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Other options of config.json that change the function, with the only value that GPT supports.
_ONLY = {
    "model_type": "gpt2",
    "position_embedding_type": "absolute",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


def from_hf(source, config: Mapping | None = None) -> tuple[GPT, dict]:
    """Load a GPT-2 of `transformers` (Radford et al. 2019) as a `GPT` and its variables.

    Args:
      source: a folder with `config.json` and `model.safetensors` (or its shards), such a `.safetensors` file, a
        `GPT2LMHeadModel` or `GPT2Model` object, or its state dict.
      config: the content of `config.json` or a `GPT2Config`; needed for a state dict, or a file without one beside it.

    Returns:
      `(model, params)`, for `model.apply(params, tokens)`, with float32 logits `[B, T, V]`. The dropout rate is
      the config's if its three rates agree, else 0.

    Raises:
      UserError: a missing or truncated file, a missing or unexpected tensor or one of another shape, or an option that
        `GPT` does not support.

    >>> model = GPT(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> import tempfile
    >>> folder = save_hf(Path(tempfile.mkdtemp()) / "gpt2", model, params)
    >>> again, its_params = from_hf(folder)
    >>> again == model, bool((again.apply(its_params, jnp.array([[1]])) == model.apply(params, jnp.array([[1]]))).all())
    (True, True)
    """
    if hasattr(config, "to_dict"):  # transformers' own
        config = config.to_dict()
    if hasattr(source, "state_dict"):
        name, state = type(source).__name__, source.state_dict()
        if config is None and not hasattr(source, "config"):
            raise UserError(f"{name} has no config, expected a GPT2LMHeadModel: give one as config=")
        config = source.config.to_dict() if config is None else config
    elif isinstance(source, Mapping):
        name, state = "the state dict", source
        if config is None:
            raise UserError(
                "a state dict does not contain the number of heads: give config=, the content of config.json"
            )
    elif not isinstance(source, str | os.PathLike):
        raise UserError(f"from_hf was given a {type(source).__name__}: expected a path, or a GPT2LMHeadModel")
    else:
        name, path = str(source), Path(source)
        if config is None:
            config = read_config(path)
        state = _read(path)
    model = make_model(config, name)
    return model, {"params": load_state(model, state, name)}


def to_hf(model: GPT, params) -> dict:
    """The state dict of the equivalent `GPT2LMHeadModel`, as torch tensors for its `load_state_dict`.

    A model without biases gets biases of 0.

    Args:
      model: a `GPT` with learned positions and only options that GPT-2 has.
      params: its variables `{"params": …}`.

    Returns:
      Tensors by name, float32; `lm_head.weight` is the embedding.

    Raises:
      UserError: an option that GPT-2 does not have, parameters of another model, or torch is not installed.

    >>> model = GPT(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> to_hf(model, params)["transformer.h.0.attn.c_attn.weight"].shape
    torch.Size([8, 24])
    """
    return tensors.as_torch(_with_biases(model, tensors.bare(params)), "to_hf")


def save_hf(folder: str | Path, model: GPT, params, tokenizer=None) -> Path:
    """Write `config.json` and `model.safetensors` to a folder, for `transformers` and `from_hf`.

    Args:
      folder: a new one.
      model, params: as for `to_hf`; torch is not needed.
      tokenizer: of kind "bpe", written as `tokenizer.json`; None for none.

    Returns:
      The folder.

    Raises:
      UserError: as for `to_hf`; a folder that exists and is not empty; a tokenizer of another kind.

    >>> import tempfile
    >>> model = GPT(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> folder = save_hf(Path(tempfile.mkdtemp()) / "gpt2", model, params)
    >>> sorted(path.name for path in folder.iterdir())
    ['config.json', 'model.safetensors']
    """
    safetensors = _import_safetensors()
    folder = Path(folder).absolute()
    config, state = make_config(model), _with_biases(model, tensors.bare(params))
    del state["lm_head.weight"]  # tied
    files = {"config.json": config, **({} if tokenizer is None else _tokenizer_files(tokenizer))}
    if "tokenizer.json" in files:
        ids = files["tokenizer.json"]["model"]["vocab"]
        config["bos_token_id"] = config["eos_token_id"] = ids.get("<|endoftext|>")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists: choose a new folder")
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for file, content in files.items():
            (unfinished / file).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        safetensors.numpy.save_file(state, unfinished / "model.safetensors", metadata={"format": "pt"})
        shutil.copymode(unfinished / "config.json", unfinished / "model.safetensors")  # readable by other users too
        os.replace(unfinished, folder)  # atomic
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{folder} cannot be written ({getattr(error, 'strerror', None) or error}): choose another folder"
        ) from error
    return folder


def is_hf(path: str | Path) -> bool:
    """Whether a path is a folder or file of `transformers`, as opposed to a workdir of attnlab."""
    path = Path(path)
    if path.suffix == ".safetensors":
        return True
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return "model_type" in json.loads((path / "config.json").read_text(encoding="utf-8"))
    return False


def read_config(path: Path) -> dict:
    """Read the `config.json` in a folder, or beside a file.

    Raises:
      UserError: the file is missing, or is not a JSON object.
    """
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; download it first, with its config.json and tokenizer files")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{file} is missing, which contains the number of heads: put it there") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON ({error}): restore it") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} holds a {type(config).__name__}, expected an object: restore it")
    return config


def read_tokenizer(path: Path) -> tokenizers.Tokenizer | None:
    """Load the tokenizer files in a folder, or beside a file; None if there are none."""
    return tokenizers.pretrained(path if path.is_dir() else path.parent)


def make_model(config: Mapping, name: str = "config") -> GPT:
    """Build the `GPT` that a GPT-2 config describes.

    Args:
      config: the content of `config.json`.
      name: name of the source in errors.

    Raises:
      UserError: a field is malformed, or has a value that `GPT` does not support.

    >>> make_model({"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 128}).width
    64
    """
    for field, only in _ONLY.items():
        if config.get(field, only) != only:
            raise UserError(
                f"{name}: {field} = {config[field]!r} in its config, expected {only!r}: GPT supports no other"
            )
    activation = config.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UserError(
            f"{name}: activation_function = {activation!r} in its config, expected one of {', '.join(_ACTIVATIONS)}"
        )

    def integer(field, default=None):
        value = config.get(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise UserError(f"{name}: {field} = {value!r} in its config, expected an integer, 1 or more and below 2^31")
        return value

    width, num_heads = integer("n_embd", 768), integer("n_head", 12)
    epsilon = config.get("layer_norm_epsilon", 1e-5)
    if not isinstance(epsilon, float) or not 0 < epsilon < math.inf:
        raise UserError(f"{name}: layer_norm_epsilon = {epsilon!r} in its config, expected a number above 0")
    rates = [config.get(field, 0.1) for field in _DROPOUTS]
    for field, rate in zip(_DROPOUTS, rates):
        if not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise UserError(f"{name}: {field} = {rate!r} in its config, expected a probability in [0, 1)")
    inner = integer("n_inner") if config.get("n_inner") is not None else 4 * width
    model = GPT(
        vocab_size=integer("vocab_size", 50257),
        num_layers=integer("n_layer", 12),
        num_heads=num_heads,
        width=width,
        context=integer("n_positions", config.get("n_ctx", 1024)),
        dropout=float(rates[0]) if rates.count(rates[0]) == len(rates) else 0.0,
        mlp_ratio=inner // width if inner % width == 0 else inner / width,
        activation=_ACTIVATIONS[activation],
        norm_epsilon=epsilon,
    )
    try:
        check_shape(model)
    except ValueError as error:
        raise UserError(f"{name}: n_embd and n_head in its config do not fit: {error}") from error
    return model


def make_config(model: GPT) -> dict:
    """The content of `config.json` for a model.

    Raises:
      UserError: an option that GPT-2 does not have.

    >>> make_config(GPT(vocab_size=10, num_layers=2, num_heads=4, width=64, context=128))["n_positions"]
    128
    """
    if not isinstance(model, GPT):
        raise UserError(f"a {type(model).__name__}: expected attnlab.nn.GPT")
    activations = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
    if model.activation not in activations:
        raise UserError(f"model.activation = {model.activation!r}: GPT-2 supports {', '.join(activations)}")
    for field, only in (("positions", "learned"), ("window", None), ("soft_cap", None), ("qk_norm", False)):
        if getattr(model, field) != only:
            raise UserError(f"model.{field} = {getattr(model, field)!r}: GPT-2 supports only {only!r}")
    if (model.kv_heads or model.num_heads) != model.num_heads:
        raise UserError(f"model.kv_heads = {model.kv_heads}: GPT-2 supports only num_heads = {model.num_heads}")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_positions": model.context,
        "n_embd": model.width,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": round(model.mlp_ratio * model.width),
        "activation_function": activations[model.activation],
        "layer_norm_epsilon": model.norm_epsilon,
        **dict.fromkeys(_DROPOUTS, model.dropout),
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


def load_state(model: GPT, state: Mapping, name: str, transposed: bool = False) -> dict:
    """Read the parameters of a GPT from a state dict with GPT-2's names.

    Args:
      model: with learned positions.
      state: tensors by name.
      name: name of the state dict in errors.
      transposed: whether kernels are `[out, in]`, as in torch's Linear and nanoGPT; GPT-2 uses `[in, out]`.

    Raises:
      UserError: a tensor is missing, unexpected or of another shape, or the output layer is not tied to the embedding.
    """
    prefix = "transformer." if any(key.startswith("transformer.") for key in state) else ""
    # The output layer is tied to the embedding; older files contain the causal mask.
    masks = [f"{prefix}h.{i}.attn.{mask}" for i in range(model.num_layers) for mask in ("bias", "masked_bias")]
    shapes = tensors.shapes_of(model, _TOKENS)
    params = tensors.load(_layout(model, prefix, transposed), state, shapes, name, ignored=["lm_head.weight", *masks])
    head = state.get("lm_head.weight")
    if head is not None and not np.array_equal(
        tensors.as_numpy(head, f"{name}: lm_head.weight"), params["embed"]["embedding"]
    ):
        raise UserError(f"{name}: lm_head.weight differs from the embedding: GPT supports only tied embeddings")
    return jax.tree.map(jnp.asarray, params)


def unload_state(model: GPT, params, transposed: bool = False) -> dict[str, np.ndarray]:
    """The state dict with GPT-2's names for the parameters of a GPT, the inverse of `load_state`.

    Raises:
      UserError: an option that GPT-2 does not have, parameters of another model.
    """
    make_config(model)  # raises for options that GPT-2 does not have
    params = unstack_layers(params)
    tensors.check(params, tensors.shapes_of(model, _TOKENS), "the model")
    state = tensors.unload(_layout(model, "transformer.", transposed), params)
    return state | {"lm_head.weight": state["transformer.wte.weight"]}


_TOKENS = np.zeros((1, 1), np.int32)


def _layout(model: GPT, prefix: str, transposed: bool) -> list[Tensor]:
    """Map the parameters of a GPT to the tensors of GPT-2's state dict."""
    width, hidden = model.width, round(model.mlp_ratio * model.width)
    places = [
        Tensor(f"{prefix}wte.weight", (model.vocab_size, width), ("embed/embedding",)),
        Tensor(f"{prefix}wpe.weight", (model.context, width), ("positions/embedding",)),
    ]

    def norm(name, path):
        yield Tensor(f"{name}.weight", (width,), (f"{path}/scale",))
        if model.use_bias:
            yield Tensor(f"{name}.bias", (width,), (f"{path}/bias",))

    def linear(name, rows, columns, *paths):
        shape = (columns, rows) if transposed else (rows, columns)
        yield Tensor(f"{name}.weight", shape, tuple(f"{path}/kernel" for path in paths), transposed)
        if model.use_bias:
            yield Tensor(f"{name}.bias", (columns,), tuple(f"{path}/bias" for path in paths))

    for layer in range(model.num_layers):
        name, block = f"{prefix}h.{layer}", f"block_{layer}"
        projections = [f"{block}/attention/{which}" for which in ("query", "key", "value")]
        places += norm(f"{name}.ln_1", f"{block}/attention_norm")
        places += linear(f"{name}.attn.c_attn", width, 3 * width, *projections)
        places += linear(f"{name}.attn.c_proj", width, width, f"{block}/attention/out")
        places += norm(f"{name}.ln_2", f"{block}/mlp_norm")
        places += linear(f"{name}.mlp.c_fc", width, hidden, f"{block}/mlp/up")
        places += linear(f"{name}.mlp.c_proj", hidden, width, f"{block}/mlp/down")
    return [*places, *norm(f"{prefix}ln_f", "final_norm")]


def _with_biases(model: GPT, params) -> dict[str, np.ndarray]:
    """The state dict of the equivalent GPT-2, which always has biases: 0 for a model without them."""
    state = unload_state(model, params)
    if model.use_bias:
        return state
    places = _layout(model.clone(use_bias=True), "transformer.", transposed=False)
    return {place.name: np.zeros(place.shape, np.float32) for place in places} | state


def _read(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a safetensors file, or of all those in a folder."""
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.exists():
            try:
                files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
                if odd := [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]:
                    raise ValueError(f"it names the file {odd[0]!r}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{index} is not an index of tensors ({error}): restore it") from error
        else:
            files = ["model.safetensors"]
        return {name: array for file in files for name, array in _read(path / file).items()}
    safetensors = _import_safetensors()
    try:
        with path.open("rb"):  # for its error messages, which are clearer than safetensors'
            return safetensors.numpy.load_file(path)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: only safetensors files can be read") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a complete safetensors file ({_damage(path) or error}): download it again"
        ) from error


def _damage(path: Path) -> str:
    """Describe where a safetensors file is truncated.

    The format: 8 bytes with the header's length, a JSON header, the tensors.
    """
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
        ends = {name: 8 + length + at["data_offsets"][1] for name, at in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"of {len(content):,} bytes, its header is truncated or damaged"
    cut = sorted((name for name, end in ends.items() if end > len(content)), key=ends.get)
    return f"it ends within the tensor {cut[0]}, at {len(content):,} of {max(ends.values()):,} bytes" if cut else ""


def _import_safetensors():
    try:
        import safetensors.numpy
    except ImportError as error:
        raise UserError("safetensors is not installed, which the weight files need: pip install safetensors") from error
    return safetensors


def _tokenizer_files(tokenizer) -> dict:
    if tokenizer.kind != "bpe":
        raise UserError(f"a tokenizer of kind {tokenizer.kind!r}: GPT-2 has 'bpe', leave it out")
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {
        "tokenizer.json": tokenizer.to_dict()["tokenizer"] | {"decoder": decoder},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
    }
