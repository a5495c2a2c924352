"""A trained model's step as a program that runs with JAX alone, on platforms that this machine need not have."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import export

from attnlab.nn import GPT, KVCache
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
    """Exports `step(params, tokens, caches) -> (logits, caches)`, which reads tokens and predicts those after them.

    Caches cross as plain arrays: a tuple of `(key, value, length)`, one a layer, as in `KVCache`. So the serialized
    program needs JAX and no attnlab: `jax.export.deserialize(data).call(params, tokens, caches)`, where data is what
    `serialize()` gave. (JAX wants the package flatbuffers for both: `pip install attnlab[export]`.) The shapes are
    fixed: a prompt of 100 tokens, and the tokens after it one at a time, are two exports that share caches.

    Args:
      model: whose `impl`, where it is "auto", becomes one that every platform has.
      params: its variables, `{"params": …}`, as for `model.apply`; their shapes suffice.
      batch: B, rows.
      tokens: T, tokens a row that a step reads.
      capacity: S, positions that the caches keep; the model's context when None.
      platforms: where the program shall run.

    Returns:
      The exported step of params, int32 tokens `[B, T]` and caches of keys and values `[B, S, Hk, D]` and int32 lengths
      `[B]`, to float32 logits `[B, T, V]` and the extended caches. A cache that has seen nothing is all zeros.

    Raises:
      ValueError: more tokens than the capacity, or a size below 1.

    >>> model = GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> exported = export_step(model, params)
    >>> exported.platforms
    ('cpu', 'cuda', 'tpu')
    >>> caches = jax.tree.map(jnp.zeros_like, tuple(map(tuple, model.empty_caches(batch=1))))
    >>> logits, caches = exported.call(params, jnp.array([[3]], jnp.int32), caches)
    >>> logits.shape
    (1, 1, 10)
    """
    for name, size in (("batch", batch), ("tokens", tokens), ("capacity", capacity)):
        if size is not None and size < 1:
            raise ValueError(f"{name} = {size}: expected 1 or more")
    platforms = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    if model.impl == "auto":  # which asks what this machine is
        model = model.clone(impl="dense" if is_small(tokens, capacity or model.context) else "blockwise")

    def step(params, tokens, caches):
        logits, caches = model.apply(params, tokens, caches=tuple(KVCache(*cache) for cache in caches))
        return logits, tuple(map(tuple, caches))

    def empty():
        return jnp.zeros((batch, tokens), jnp.int32), tuple(map(tuple, model.empty_caches(batch, capacity)))

    return export.export(jax.jit(step), platforms=platforms)(params, *jax.eval_shape(empty))
