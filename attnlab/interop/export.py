"""Export a trained model's step as a program that runs with JAX alone, also for other platforms."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import export

from attnlab.nn import GPT
from attnlab.ops.attention import is_small

__all__ = ["export_step"]


def export_step(
    model: GPT,
    params: dict,
    *,
    batch: int = 1,
    tokens: int = 1,
    capacity: int | None = None,
    platforms: str | Sequence[str] = ("cpu", "cuda", "tpu"),
) -> export.Exported:
    """Export `step(params, tokens, caches) -> (logits, caches)`, which predicts the next tokens.

    Caches are passed as plain arrays, a tuple per layer: for attention `(key, value, length, forget, conv)`, the fields
    of `KVCache`, where the last two may be None; for other layers `(state, conv, length)`, as in `MixerState`. So
    the serialized program needs JAX but not attnlab: `jax.export.deserialize(data).call(params, tokens, caches)`, where
    `data` is the result of `serialize()` (both functions need the package flatbuffers). Shapes are fixed: a prompt of
    100 tokens and the single tokens after it need two exports, which can share caches.

    Args:
      model: the model; an `impl` of "auto" is replaced by a backend that every platform has.
      params: the model's variables, `{"params": …}`, as for `model.apply`, or only their shapes.
      batch: B, batch size.
      tokens: T, tokens per sequence and step.
      capacity: S, positions that the caches of attention keep; the model's context when None.
      platforms: platforms to export for.

    Returns:
      The exported step. It takes params, int32 tokens `[B, T]` and caches: for attention, keys and values
      `[B, S, Hk, D]` and int32 lengths `[B]`. It returns float32 logits `[B, T, V]` and the extended caches. An
      empty cache is all zeros.

    Raises:
      ValueError: more tokens than the capacity, or a size below 1.

    >>> model = GPT.of(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> exported = export_step(model, params)
    >>> exported.platforms
    ('cpu', 'cuda', 'tpu')
    >>> caches = jax.tree.map(jnp.zeros_like, tuple(map(tuple, model.init_caches(batch=1))))
    >>> logits, caches = exported.call(params, jnp.array([[3]], jnp.int32), caches)
    >>> logits.shape
    (1, 1, 10)
    """
    for name, size in (("batch", batch), ("tokens", tokens), ("capacity", capacity)):
        if size is not None and size < 1:
            raise ValueError(f"{name} = {size}: expected 1 or more")
    platforms = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    impl = "dense" if is_small(tokens, capacity or model.config.context) else "blockwise"

    def chosen(layer):  # "auto" would choose by this machine's platform
        is_auto = layer.module.operator == "attention" and layer.impl == "auto"
        return dataclasses.replace(layer, impl=impl) if is_auto else layer

    model = model.replace(layers=tuple(map(chosen, model.config.layers)))

    types = [type(cache) for cache in jax.eval_shape(lambda: model.init_caches(batch, capacity))]

    def step(params, tokens, caches):
        caches = tuple(kind(*cache) for kind, cache in zip(types, caches))
        logits, caches = model.apply(params, tokens, caches=caches)
        return logits, tuple(map(tuple, caches))

    def empty():
        return jnp.zeros((batch, tokens), jnp.int32), tuple(map(tuple, model.init_caches(batch, capacity)))

    return export.export(jax.jit(step), platforms=platforms)(params, *jax.eval_shape(empty))
