"""The residual stream as a sum: each head's contribution to a logit."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from attnlab.nn import taps
from attnlab.see.edits import Put, site_key
from attnlab.see.linen import Linen
from attnlab.see.models import ModelView, adapt
from attnlab.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Contributions:
    """A target's logit as a sum over the model's parts.

    The parts of a difference of two logits are the differences of parts: `jax.tree.map(jnp.subtract, one, other)`.

    Attributes:
      heads: `[L, H, B, T]`, from each head's output.
      blocks: `[N, B, T]`, from the rest of each of N blocks: its feed-forward layer, its biases, and a mixer without
        heads.
      embedding: `[B, T]`, from the input of the first block.
      constant: `[B, T]`, from the biases of the norm and of the output layer.
      logits: `[B, T]`, the model's result, which the parts sum to.

    >>> parts = Contributions(*(jnp.ones(shape) for shape in ((2, 4, 1, 3), (2, 1, 3), (1, 3), (1, 3), (1, 3))))
    >>> parts.total.shape
    (1, 3)
    """

    heads: Float[Array, "L H B T"]
    blocks: Float[Array, "N B T"]
    embedding: Float[Array, "B T"]
    constant: Float[Array, "B T"]
    logits: Float[Array, "B T"]

    @property
    def total(self) -> Float[Array, "B T"]:
        """The sum of all parts."""
        return self.heads.sum((0, 1)) + self.blocks.sum(0) + self.embedding + self.constant


def contributions(model, variables, *args, targets: Int[Array, "B T"], **kwargs) -> Contributions:
    """Direct logit attribution (Elhage et al. 2021): the direct contribution of each head's output to a logit.

    The last norm's divisor at each position depends on all parts; freezing it at its value in this run makes the
    logit a sum. Head h contributes z_h·W_O[h] to the stream.

    Args:
      model: a `flax.linen` module of pre-norm blocks, `x + f(norm(x))`, with at most one norm after the last block;
        its attention layers have an output projection `out/kernel` `[H, D, F]`.
      variables, args, kwargs: as for `capture`.
      targets: `[B, T]`, the token whose logit is decomposed at each position.

    Returns:
      `Contributions`, whose total equals `logits` up to rounding; under `jit`, NaN instead of the second ValueError.

    Raises:
      ValueError: as for `capture`; or the model has another form, so the parts do not sum to the logits.

    >>> model = GPT.of(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> tokens = jnp.array([[1, 2, 3]])
    >>> parts = contributions(model, model.init(jax.random.key(0), tokens), tokens, targets=jnp.array([[2, 3, 4]]))
    >>> parts.heads.shape, bool(jnp.allclose(parts.total, parts.logits, atol=1e-5))
    ((2, 2, 1, 3), True)
    """
    view, inputs = adapt(model, variables, args, kwargs)
    if not view.sites.blocks:
        raise ValueError("contributions need a model with blocks, layers that take and return one residual stream")
    if not isinstance(view.adapter, Linen):
        raise ValueError("contributions need a flax.linen model: move the weights to one, see attnlab.interop")
    parts, left, dtypes = _contributions(view, inputs, jnp.asarray(targets))
    error = jnp.abs(parts.total - parts.logits).max() / jnp.maximum(jnp.abs(parts.logits).max(), 1)
    tolerance = float(np.sqrt(max(jnp.finfo(x.dtype).eps for x in jax.tree.leaves((parts, dtypes)))))
    if isinstance(error, jax.core.Tracer):
        return jax.tree.map(lambda x: jnp.where(jnp.maximum(error, left) <= tolerance, x, jnp.nan), parts)
    if not max(float(error), float(left)) <= tolerance:
        raise ValueError(
            f"the parts differ from the logits by {float(error):.1e}, and the blocks from a sum by {float(left):.1e}: "
            "expected blocks x + attention + mlp and one LayerNorm or RMSNorm after the last"
        )
    return parts


@functools.partial(jax.jit, static_argnums=0)
def _contributions(view: ModelView, inputs, targets):
    """Return (contributions, the largest `_left` of a block, a scalar of the stream's dtype)."""
    first, last = view.sites.blocks[0], view.sites.blocks[-1]
    run = view.run(inputs, want=("z", taps.MADE, *taps.STREAMS, *((taps.NORM,) if view.sites.norms else ())))
    frozen = {site_key(path, taps.NORM): Put(divisor) for path, divisor in run.values.get(taps.NORM, {}).items()}

    def logits(stream):
        put = {site_key(last, "in"): Put(run.values["in"][last]), site_key(last, "out"): Put(stream)}
        return _logits(view.run(inputs, edits=frozen | put).out, targets)

    # With the norm frozen, logits are affine in the stream: one gradient gives every part's share.
    stream = run.values["out"][last]
    (gradient,) = jax.vjp(lambda stream: logits(stream).sum(), stream)[1](jnp.ones((), run.out.dtype))
    share = functools.partial(jnp.einsum, "...f,...f->...", gradient)
    heads, blocks = [], {path: run.values["out"][path] - run.values["in"][path] for path in view.sites.blocks}
    for site in view.sites:
        kernel = _out_kernel(inputs[0], site.path)
        by_head = jnp.einsum("bthd,hdf->hbtf", run.values["z"][site.path], kernel)
        heads.append(jax.vmap(share)(by_head))
        block = view.sites.block_of(site.path)
        if block is None:
            raise ValueError(f"contributions need all attention in blocks, and {site.path} is in none")
        blocks[block] = blocks[block] - by_head.sum(axis=0)
    with_heads = {view.sites.block_of(site.path) for site in view.sites}
    left = jnp.stack([_left(run, block, blocks[block], inputs[0], view) for block in with_heads]).max()
    parts = Contributions(
        heads=jnp.stack(heads),
        blocks=jnp.stack([share(rest) for rest in blocks.values()]),
        embedding=share(run.values["in"][first]),
        constant=logits(jnp.zeros_like(stream)),
        logits=_logits(run.out, targets),
    )
    return parts, left, stream[(0,) * stream.ndim]


def _left(run, block: str, rest, variables, view: ModelView):
    """Relative distance of a block from x + attention + mlp, where mlp is one layer's output or 0.

    Heads add their outputs to the stream unchanged only if the rest is their bias plus this mlp.
    """
    for site in view.sites:
        if view.sites.block_of(site.path) == block and (bias := _out(variables, site.path).get("bias")) is not None:
            rest = rest - bias
    outputs = [x for path, x in run.values[taps.MADE].items() if path.startswith(f"{block}/") and x.shape == rest.shape]
    size = jnp.maximum(jnp.abs(run.values["out"][block]).max(), 1e-30)
    return jnp.stack([jnp.abs(rest - x).max() / size for x in (jnp.zeros_like(rest), *outputs)]).min()


def _logits(out, targets):
    if targets.shape != out.shape[:-1]:
        raise ValueError(f"targets has shape {targets.shape}, expected {out.shape[:-1]}: a token for each position")
    return jnp.take_along_axis(out, targets[..., None], axis=-1)[..., 0]


def _out(variables, path: str) -> dict:
    """The parameters of a layer's output projection."""
    node = nn.meta.unbox(variables["params"])
    for part in filter(None, path.split("/")):
        node = node.get(part, {})
    return node.get("out", {})


def _out_kernel(variables, path: str):
    kernel = _out(variables, path).get("kernel")
    if np.ndim(kernel) != 3:
        raise ValueError(f"{path} has no output projection out/kernel [H, D, F], which contributions need")
    return kernel
