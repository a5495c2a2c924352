"""Convert torch's attention modules and nanoGPT checkpoints to attnlab and back."""

import re
from collections.abc import Mapping
from pathlib import Path

import flax.linen as nn
import jax.numpy as jnp

from attnlab.interop import tensors
from attnlab.interop.huggingface import conversion, weights
from attnlab.nn import GPT, Block, Mlp, MultiHeadAttention
from attnlab.support.errors import UserError

__all__ = ["from_nanogpt", "from_torch", "to_nanogpt", "to_torch"]


def from_torch(source) -> tuple[nn.Module, dict]:
    """Convert a module of torch to the equivalent module of `attnlab.nn`.

    | torch | attnlab |
    |---|---|
    | `nn.MultiheadAttention` | `MultiHeadAttention` |
    | `nn.TransformerEncoderLayer` | `Block`, with `norm_at` "before" or "stream" |

    Inputs are `[batch, length, features]` whatever torch's `batch_first`, and masks are attnlab's. Dropout rates are
    kept, but torch's encoder layer also has dropout inside the feed-forward layer, which `Block` does not have.

    Args:
      source: the module of torch.

    Returns:
      `(module, params)`, for `module.apply(params, x)`.

    Raises:
      UserError: another class, an unsupported option, or a parameter that is not float32 or a 16-bit float.

    >>> import torch
    >>> module, params = from_torch(torch.nn.MultiheadAttention(8, num_heads=2))
    >>> module.apply(params, jnp.ones((3, 5, 8))).shape  # [batch, length, features]
    (3, 5, 8)
    """
    module, shapes, table = _equivalent(source)
    buffers = [name for name, _ in source.named_buffers()]
    params = tensors.load(table, source.state_dict(), shapes, type(source).__name__, ignored=buffers)
    return module, {"params": params}


def to_torch(params, like) -> dict:
    """Convert attnlab's parameters to the state dict of a torch module, for `like.load_state_dict(…)`.

    Args:
      params: variables `{"params": …}` of the module that `from_torch(like)` returns.
      like: the module of torch; its parameters are ignored, and its buffers are copied.

    Returns:
      torch tensors by name, float32.

    Raises:
      UserError: as for `from_torch`; parameters that are missing, unexpected, or of another shape.

    >>> import torch
    >>> theirs = torch.nn.MultiheadAttention(8, num_heads=2)
    >>> module, params = from_torch(theirs)
    >>> theirs.load_state_dict(to_torch(params, like=theirs))
    <All keys matched successfully>
    """
    (_, shapes, table), params = _equivalent(like), tensors.bare(params)
    tensors.check(params, shapes, type(like).__name__)
    return like.state_dict() | tensors.as_torch(tensors.unload(table, params), "to_torch")


def from_nanogpt(path: str | Path) -> tuple[GPT, dict]:
    """Load a `ckpt.pt` of nanoGPT as a `GPT` and its variables.

    nanoGPT uses the exact GELU; until its commit 594068e of May 2023 it used the tanh form. Checkpoints do not record
    the form, so use `model.replace(activation="gelu_tanh")` for older checkpoints. The tokenizer is not in the
    checkpoint: a character vocabulary is in `meta.pkl` of the data folder; otherwise the tokenizer is GPT-2's.

    Args:
      path: the file; loading it runs no code.

    Returns:
      `(model, params)`, for `model.apply(params, tokens)`.

    Raises:
      UserError: a file that is missing or not from nanoGPT; a tensor that is missing, unexpected, or of another shape.

    >>> import tempfile, torch
    >>> model = GPT.of(
    ...     vocab_size=10,
    ...     num_layers=1,
    ...     num_heads=2,
    ...     width=8,
    ...     context=6,
    ...     positions="learned",
    ...     activation="gelu",
    ...     use_bias=True,
    ...     attention={"qk_norm": False},
    ... )
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> sizes = {"vocab_size": 10, "n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 6, "bias": True}
    >>> path = Path(tempfile.mkdtemp()) / "ckpt.pt"
    >>> torch.save({"model": to_nanogpt(model, params), "model_args": sizes}, path)  # as nanoGPT's train.py does
    >>> from_nanogpt(path)[0] == model
    True
    """
    torch = tensors.import_torch("from_nanogpt")
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types
        why = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().partition("\n")[0].partition(". ")[0]
        raise UserError(
            f"{path} is not a complete checkpoint of tensors and plain values ({why or type(error).__name__}): save it "
            "again"
        ) from error
    sizes, state = (saved.get(name) if isinstance(saved, Mapping) else None for name in ("model_args", "model"))
    if not isinstance(sizes, Mapping) or not isinstance(state, Mapping):
        raise UserError(f"{path} has no 'model' and 'model_args': is it nanoGPT's ckpt.pt?")
    # torch.compile prefixes every name.
    state = {str(name).removeprefix("_orig_mod."): tensor for name, tensor in state.items()}
    if missing := {"vocab_size", "n_layer", "n_head", "n_embd", "block_size"} - sizes.keys():
        raise UserError(f"{path}: model_args lacks {sorted(missing)[0]}: is it nanoGPT's ckpt.pt?")
    use_bias = sizes.get("bias", True)  # absent in older checkpoints
    if not isinstance(use_bias, bool):
        raise UserError(f"{path}: model_args.bias = {use_bias!r}, expected True or False")
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), sizes.get("dropout", 0.0))
    config = {name: sizes[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
    config |= {"n_positions": sizes["block_size"], "activation_function": "gelu", **rates}
    model = conversion.make_model(config, str(path)).replace(use_bias=use_bias)
    return model, {"params": weights.load_state(model, state, str(path), transposed=True)}


def to_nanogpt(model: GPT, params) -> dict:
    """The state dict of nanoGPT's `GPT` for an equivalent model, as torch tensors.

    Args:
      model: with learned positions, as `from_nanogpt` returns it.
      params: its variables `{"params": …}`.

    Raises:
      UserError: an option that nanoGPT does not have; parameters of another model.

    >>> model = GPT.of(width=8, num_heads=2, positions="learned", activation="gelu", attention={"qk_norm": False})
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> to_nanogpt(model, params)["transformer.h.0.attn.c_attn.weight"].shape
    torch.Size([24, 8])
    """
    conversion.make_config(model, "gpt2")  # raises for other options
    state = weights.unload_state(model, tensors.bare(params), transposed=True)
    for field, only in (("activation", "gelu"), ("mlp_ratio", 4), ("norm_epsilon", 1e-5)):
        if getattr(model.config, field) != only:
            raise UserError(f"model.{field} = {getattr(model.config, field)!r}: nanoGPT supports only {only!r}")
    return tensors.as_torch(state, "to_nanogpt")


def _equivalent(source) -> tuple[nn.Module, dict, list[tensors.Tensor]]:
    """The module equivalent to a module of torch, the shapes of its parameters, and the tensors that hold them."""
    layers = tensors.import_torch("from_torch").nn
    known = {layers.MultiheadAttention: _multihead_attention, layers.TransformerEncoderLayer: _encoder_layer}
    for kind, describe in known.items():
        if isinstance(source, kind):
            if type(source).forward is not kind.forward:
                raise UserError(
                    f"{type(source).__name__} overrides forward of {kind.__name__}: expected {kind.__name__} itself"
                )
            module, widths, lines = describe(source)
            shapes = tensors.shapes_of(module, *(jnp.zeros((1, 1, width)) for width in widths))
            entries = tensors.named(tensors.flat_shapes(shapes), "", "", lines)
            # Input projections have names like "in_proj_weight", without a dot.
            entries = [each._replace(name=re.sub(r"([nqkv]_proj)\.", r"\1_", each.name)) for each in entries]
            return module, shapes, [each for each in entries if each.name in source.state_dict()]
    raise UserError(
        f"from_torch cannot convert a {type(source).__name__}: expected torch.nn.MultiheadAttention or "
        "torch.nn.TransformerEncoderLayer"
    )


# If keys and values have another width, torch has separate kernels.
_ATTENTION = {"in_proj": "query key value", "q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
_ENCODER = {"linear1": "mlp/up", "linear2": "mlp/down", "norm1": "attention_norm", "norm2": "mlp_norm"}
_ENCODER |= {
    f"self_attn.{name}": " ".join(f"attention/{path}" for path in paths.split()) for name, paths in _ATTENTION.items()
}


def _multihead_attention(source):
    for option, only in (("bias_k", None), ("bias_v", None), ("add_zero_attn", False)):
        if getattr(source, option) is not only:
            raise UserError(f"MultiheadAttention has {option}, which attnlab's MultiHeadAttention does not support")
    if source.kdim != source.vdim:
        raise UserError(f"MultiheadAttention has kdim = {source.kdim} and vdim = {source.vdim}: expected them equal")
    use_bias = source.in_proj_bias is not None
    module = MultiHeadAttention(source.num_heads, use_bias=use_bias, dropout_rate=source.dropout)
    return module, (source.embed_dim, source.kdim), _ATTENTION


def _encoder_layer(source):
    norms = (source.norm1, source.norm2)
    if any(type(norm).__name__ != "LayerNorm" for norm in norms) or source.norm1.eps != source.norm2.eps:
        raise UserError(f"TransformerEncoderLayer has the norms {norms}: expected two LayerNorms with one eps")
    rates = (source.dropout1.p, source.dropout2.p)
    if rates[0] != rates[1]:
        raise UserError(f"TransformerEncoderLayer has the dropout rates {rates}: expected one rate")
    use_bias = source.linear1.bias is not None
    module = Block(
        _multihead_attention(source.self_attn)[0],
        Mlp(source.linear1.out_features, _activation(source.activation), use_bias=use_bias),
        dropout_rate=source.dropout1.p,
        use_bias=use_bias,
        norm_at="before" if source.norm_first else "stream",
        norm_epsilon=source.norm1.eps,
    )
    return module, (source.linear1.in_features,), _ENCODER


def _activation(function) -> str:
    torch = tensors.import_torch("from_torch")
    functional = torch.nn.functional
    if function in (functional.relu, torch.relu) or isinstance(function, torch.nn.ReLU):
        return "relu"
    if function is functional.gelu:
        return "gelu"
    if isinstance(function, torch.nn.GELU):
        return "gelu_tanh" if function.approximate == "tanh" else "gelu"
    if function is functional.silu or isinstance(function, torch.nn.SiLU):
        return "silu"
    name = getattr(function, "__name__", repr(function))
    raise UserError(f"TransformerEncoderLayer has the activation {name}: expected relu, gelu or silu")
