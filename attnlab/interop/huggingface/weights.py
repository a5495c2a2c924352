"""Convert a state dict with the names of `transformers` to the parameters of a `GPT`, and back."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from attnlab.interop import tensors
from attnlab.interop.huggingface import tensor_names
from attnlab.interop.huggingface.families import FAMILIES, with_biases
from attnlab.interop.tensors import Tensor
from attnlab.nn import GPT, stack_layers
from attnlab.nn.stack import is_stacked
from attnlab.support.errors import UserError

_TOKENS = np.zeros((1, 1), np.int32)
_HEAD = "lm_head.weight"
_TABLES = ("embed/embedding", "output/embedding")


def load_state(
    model: GPT,
    state: Mapping,
    name: str,
    family: str = "gpt2",
    *,
    transposed: bool = False,
    interleaved: bool = False,
    shardings=None,
    dtype=jnp.float32,
) -> dict:
    """Read the parameters of a GPT from a state dict of a family; `interleaved` as for `tensor_names.table`."""
    names = FAMILIES[family].names
    state, prefix = _renamed(state, names.file_parts), f"{names.model}."
    prefix = prefix if any(key.startswith(prefix) for key in state) else ""
    shapes = _shapes(model)
    table = _table(model, family, shapes, prefix, transposed, interleaved)
    ignored = _without_parameters(model, prefix) + ([_HEAD] if model.config.tie_embeddings else [])
    ignored += _extra_heads(state, model, prefix)
    tensors.check_names(table, state, name, ignored)
    if callable(shardings):
        shardings = shardings(shapes)
    if model.config.tie_embeddings and _HEAD in state:
        _check_tied(state, table[0], name)
    table, shapes = _stacked_as(shardings, table, shapes)
    return tensors.load(table, state, shapes, name, ignored, shardings=shardings, dtype=dtype)


def unload_state(model: GPT, params, family: str = "gpt2", *, transposed: bool = False) -> dict[str, np.ndarray]:
    """The state dict of a GPT's parameters with the tensor names of a family, the inverse of `load_state`."""
    table, params = prepared(model, params, family, transposed)
    state = tensors.unload(table, params)
    return state | ({_HEAD: state[table[0].name]} if model.config.tie_embeddings else {})


def prepared(model: GPT, params, family: str, transposed: bool = False) -> tuple[list[Tensor], dict]:
    """The tensors of a model, and its parameters; GPT-2 (not nanoGPT) always has biases, so missing biases become 0."""
    shapes = _shapes(model)
    tensors.check(params, stack_layers(shapes) if is_stacked(params) else shapes, "the model")
    params = _with_scales_folded(_without_padding(params, model.config.vocab_size))
    if family == "gpt2" and not transposed:
        model = GPT(with_biases(model.config))
        shapes = _shapes(model)
    table, shapes = _stacked_as(params, _table(model, family, shapes, transposed=transposed), shapes)
    flat = traverse_util.flatten_dict(params, sep="/")
    zeros = {
        path: np.zeros(shape, np.float32) for path, shape in tensors.flat_shapes(shapes).items() if path not in flat
    }
    return [each for each in table if each.constant is None], traverse_util.unflatten_dict(flat | zeros, sep="/")


def _without_padding(params, vocab_size: int) -> dict:
    """Parameters without the padding rows of token tables, which the other framework would treat as tokens."""
    tables = {
        name: {"embedding": params[name]["embedding"][:vocab_size]} for name in ("embed", "output") if name in params
    }
    return {**params, **tables}


def _with_scales_folded(params) -> dict:
    """Parameters with the scales of head norms folded into the `out` kernels, which leaves outputs unchanged."""
    flat = traverse_util.flatten_dict(params, sep="/")
    for path in [path for path in flat if path.endswith("/attention/norm/scale")]:
        out = path.replace("/norm/scale", "/out/kernel")
        if path.replace("/norm/scale", "/lambda_q1") not in flat or np.all(np.asarray(flat[path]) == 1):
            continue
        scale, kernel = (tensors.as_numpy(flat[leaf], f"parameter {leaf}") for leaf in (path, out))
        flat |= {path: np.ones_like(scale), out: kernel * scale[..., None, :, None]}  # layers may be stacked
    return traverse_util.unflatten_dict(flat, sep="/")


def _stacked_as(like, table: list[Tensor], shapes) -> tuple[list[Tensor], dict]:
    """A table and the shapes of its parameters, with stacked layers if `like` has them."""
    if not is_stacked(like):
        return table, shapes
    shapes = stack_layers(shapes)
    return tensors.stacked(table, shapes), shapes


def _shapes(model: GPT) -> dict:
    """The shapes of a model's parameters; traces one period of layers, because a damaged config may ask for many."""
    layers, period = model.config.num_layers, len(model.config.layers[: model.config.num_layers])
    shapes = tensors.shapes_of(model.replace(num_layers=period), _TOKENS)
    return shapes | {f"block_{n}": shapes[f"block_{n % period}"] for n in range(layers)}


def _table(model: GPT, family: str, shapes, prefix=None, transposed: bool = False, interleaved: bool = False):
    """The tensors of a model; kernels are `[in, out]` in GPT-2 but `[out, in]` in nanoGPT and other families."""
    names, config = FAMILIES[family].names, model.config
    shapes = tensors.flat_shapes(shapes)
    shapes |= {path: (config.vocab_size, config.width) for path in _TABLES if path in shapes}  # without padding
    prefix = f"{names.model}." if prefix is None else prefix
    options = {"transposed": transposed or family != "gpt2"}
    return tensor_names.table(config, names, shapes, prefix, interleaved, **options)


def _renamed(state: Mapping, names: Mapping[str, str]) -> Mapping:
    """Give a file's tensors the names that transformers' modules use; `names` as in `Names.file_parts`."""
    order = list(names)
    sources = {}
    for key in state:
        parts = key.split(".")
        place = next((order.index(part) for part in parts if part in names), 0)
        sources.setdefault(".".join(names.get(part, part) for part in parts), []).append((place, key))
    return {
        key: state[keys[0][1]] if len(keys) == 1 else _joined([state[old] for _, old in sorted(keys)], key)
        for key, keys in sources.items()
    }


def _joined(parts, name: str) -> np.ndarray:
    """Concatenate tensors along the first axis."""
    return np.concatenate([tensors.as_numpy(part[:], name) for part in parts])


def _without_parameters(model: GPT, prefix: str) -> list[str]:
    """Names in older files that hold no parameters: causal masks, and frequencies of rotary positions."""
    names = ("h.{}.attn.bias", "h.{}.attn.masked_bias", "layers.{}.self_attn.rotary_emb.inv_freq")
    return [prefix + name.format(layer) for layer in range(model.config.num_layers) for name in names]


def _extra_heads(state: Mapping, model: GPT, prefix: str) -> list[str]:
    """Names of the tensors in extra layers, after the model's last, that predict later tokens."""
    numbered = {key: key.removeprefix(f"{prefix}layers.").partition(".")[0] for key in state}
    heads = {n for key, n in numbered.items() if n.isdigit() and key == f"{prefix}layers.{n}.eh_proj.weight"}
    return [key for key, n in numbered.items() if n in heads and int(n) >= model.config.num_layers]


def _check_tied(state: Mapping, embedding: Tensor, name: str) -> None:
    """Raise UserError if the output layer of a state dict differs from the embedding."""
    head, table = (state.get(key) for key in (_HEAD, embedding.name))
    if table is None:
        return  # reported as missing later

    def part(tensor, piece):
        return tensors.as_numpy(tensor[piece], f"{name}: {_HEAD}")

    pieces = tensors.pieces(*embedding.shape)
    if head.shape != table.shape or not all(np.array_equal(part(head, each), part(table, each)) for each in pieces):
        raise UserError(
            f"{name}: lm_head.weight differs from the embedding, but tie_word_embeddings is true in its config: set it "
            "to false"
        )
