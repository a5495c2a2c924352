"""Score attention heads by their patterns, against uniform attention and the untrained model.

Every head puts some weight on the targets of a kind: with uniform attention, the i-th query puts 1/i on the previous
token, and random heads favour or avoid equal tokens by chance. Each score therefore comes with its value for uniform
attention and, if untrained weights are passed, a p-value.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import special, stats

from attnlab.types import Array

KINDS = ("previous", "duplicate", "induction", "current", "sink", "entropy")
_LEAST_SPREAD = 1e-6  # least standard deviation assumed for untrained scores: equal scores differ by rounding


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of the H heads in each of L layers, and their p-values.

    Attributes:
      values: by kind, `[L, H]`: weight on the targets, 0 to 1, averaged over the queries with targets; for "entropy",
        nats averaged over all queries but the first. NaN without targets.
      uniform: by kind, the value of uniform causal attention on these tokens.
      p: by kind, `[L, H]`: p-value of a score this large (for "entropy": this small) among untrained heads, times the
        number of heads and kinds (Bonferroni), at most 1; NaN without targets. Empty without untrained weights.
      count: by kind, the number of queries with targets.
      paths: paths of the L layers.

    >>> p = {"sink": np.array([[1e-4, 1.0]])}
    >>> scored = Scores({"sink": np.array([[0.9, 0.1]])}, {"sink": 0.1}, p, {"sink": 60}, ("block_0/attention",))
    >>> scored.heads("sink")
    [(0, 0)]
    >>> print(scored)
    sink       0.900 at block_0/attention head 0; uniform 0.100; p = 0.0001 (untrained); 60 queries
    """

    values: dict[str, np.ndarray]
    uniform: dict[str, float]
    p: dict[str, np.ndarray]
    count: dict[str, int]
    paths: tuple[str, ...]

    def heads(self, kind: str, alpha: float = 0.01) -> list[tuple[int, int]]:
        """The heads (layer, head) whose p-value is below `alpha`, by descending score (for "entropy", ascending).

        Raises:
          ValueError: `kind` was not scored, or was scored without untrained weights.
        """
        if kind not in self.values:
            raise ValueError(f"kind = {kind!r} was not scored: expected one of {', '.join(self.values)}")
        if not self.p:
            raise ValueError("heads are those above an untrained model: pass its weights to scores as untrained=")
        return [at for at in self._ranked(kind) if self.p[kind][at] < alpha]

    def _ranked(self, kind: str) -> list[tuple[int, int]]:
        values = self.values[kind] if kind == "entropy" else -self.values[kind]
        places = zip(*np.unravel_index(np.argsort(values, axis=None), values.shape))
        return [(int(layer), int(head)) for layer, head in places]

    def __str__(self) -> str:
        return "\n".join(f"{kind:10} {self._highest(kind)}" for kind in self.values)

    def _highest(self, kind: str) -> str:
        if not self.count[kind]:
            return "no targets in these tokens"
        layer, head = self._ranked(kind)[0]
        p = f"p = {self.p[kind][layer, head]:.1g} (untrained); " if self.p else ""
        return (
            f"{self.values[kind][layer, head]:.3f} at {self.paths[layer]} head {head}; "
            f"uniform {self.uniform[kind]:.3f}; {p}{self.count[kind]} queries"
        )


def scores(
    patterns: Array | Sequence[Array],
    tokens: Int[Array, "B T"],
    kinds: Sequence[str] = KINDS,
    *,
    untrained: Array | Sequence[Array] | None = None,
    paths: Sequence[str] | None = None,
) -> Scores:
    """Score causal attention heads by the keys that they attend to, against the same model before training.

    A head with random weights favours some tokens by chance, and the same tokens in all sequences, so more sequences do
    not help. The test therefore compares heads: a Student's t-test of whether the head's score may be one more value of
    the sample formed by the untrained heads of its layer.

    Args:
      patterns: weights of causal self-attention, `[L, B, H, T, T]` or, for each layer, `[B, H, T, T]`.
      tokens: the tokens attended to. If each sequence repeats, the periods must differ between sequences; otherwise a
        head that attends to a fixed distance scores as an induction head.
      kinds: any of "previous", "duplicate", "induction", "current", "sink" (see `targets`) and "entropy".
      untrained: attention weights of the untrained model on the same tokens; no p-values if None. Several
        initializations may be concatenated along the head axis, which sharpens the test for layers with few heads.
      paths: names of the layers; "layer 0" and so on by default.

    Raises:
      ValueError: unknown kinds, shapes that do not fit, weights that are not finite or not causal, untrained weights
        with one head per layer, or tokens without targets of any kind.

    >>> tokens = np.random.default_rng(0).integers(0, 9, (16, 12))
    >>> previous = np.broadcast_to(np.eye(12, k=-1), (16, 1, 12, 12))
    >>> uniform = np.broadcast_to(np.tri(12) / np.arange(1, 13)[:, None], (16, 1, 12, 12))
    >>> trained, untrained = (np.concatenate(heads, axis=1)[None] for heads in ([previous, uniform], [uniform] * 2))
    >>> result = scores(trained, tokens, kinds=["previous", "induction"], untrained=untrained)
    >>> result.values["previous"].round(3), round(result.uniform["previous"], 3), result.heads("previous")
    (array([[1.   , 0.191]]), 0.191, [(0, 0)])
    """
    tokens = np.asarray(tokens)
    layers, kinds = _layers(patterns, tokens, "patterns"), _known(kinds)
    measured = {kind: _measure(layers, tokens, kind) for kind in kinds}
    scored = [kind for kind in kinds if measured[kind].count]
    if not scored:
        raise ValueError(f"tokens {list(tokens.shape)} have no target of {', '.join(kinds)}: give longer sequences")
    p = {}
    if untrained is not None:
        others, tests = _untrained(untrained, tokens, layers), len(scored) * len(layers) * layers[0].shape[1]
        for kind in kinds:
            p[kind] = np.minimum(
                1, tests * _p_untrained(kind, measured[kind].values, _measure(others, tokens, kind).values)
            )
    return Scores(
        values={kind: measured[kind].values for kind in kinds},
        uniform={kind: measured[kind].uniform for kind in kinds},
        p=p,
        count={kind: measured[kind].count for kind in kinds},
        paths=tuple(paths or (f"layer {layer}" for layer in range(len(layers)))),
    )


def shares(pattern: Float[Array, "*B H Q K"]) -> Float[Array, "*B H Q K"]:
    """The share of each key in a query's absolute weights, |p| / Σ|p|, as Ali et al. 2024 show for Mamba.

    The weights of a recurrence may be negative and have any sum, but scores and pages need weights that sum to 1. A
    query whose weights are all 0 gets zeros.

    >>> shares(jnp.array([[[1.0, 0.0], [3.0, -1.0]]]))
    Array([[[1.  , 0.  ],
            [0.75, 0.25]]], dtype=float32)
    """
    size = jnp.abs(pattern)
    total = size.sum(axis=-1, keepdims=True)
    return size / jnp.where(total > 0, total, 1)


def targets(kind: str, tokens: Int[Array, "B T"]) -> Bool[np.ndarray, "B T T"]:
    """The keys that a head of this kind attends to, for each query.

    - "previous": the key before the query (Voita et al. 2019);
    - "duplicate": earlier keys with the query's token (Wang et al. 2022);
    - "induction": keys that follow an earlier key with the query's token (Olsson et al. 2022);
    - "current": the key at the query's position;
    - "sink": the first key, for all queries but the first (Xiao et al. 2023).
    """
    tokens = np.asarray(tokens)
    query, key = np.arange(tokens.shape[1])[:, None], np.arange(tokens.shape[1])
    earlier = (tokens[:, :, None] == tokens[:, None, :]) & (key < query)
    if kind == "previous":
        wanted = key == query - 1
    elif kind == "duplicate":
        wanted = earlier
    elif kind == "induction":
        wanted = np.pad(earlier[:, :, :-1], ((0, 0), (0, 0), (1, 0)))
    elif kind == "current":
        wanted = key == query
    elif kind == "sink":
        wanted = (key == 0) & (query > 0)
    else:
        raise ValueError(f"kind = {kind!r} has no targets: expected one of {', '.join(KINDS[:-1])}")
    return np.broadcast_to(wanted, earlier.shape)


def _on(pattern: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The weight `[B, H, T]` of each query on its wanted keys `[B, T, T]`."""
    return np.vecdot(pattern, wanted[:, None].astype(pattern.dtype)).astype(np.float64)


class _Measured(NamedTuple):
    """Scores of one kind; NaN without targets."""

    values: np.ndarray  # [L, H], mean over the queries with targets
    uniform: float  # the value for uniform causal attention
    count: int  # number of queries with targets


def _measure(layers: Sequence[Array], tokens: np.ndarray, kind: str) -> _Measured:
    visible = np.arange(1, tokens.shape[1] + 1)
    if kind == "entropy":
        chosen = np.broadcast_to(visible > 1, tokens.shape)  # the first query has one visible key
        by_query = [special.entr(np.asarray(layer, np.float64)).sum(-1) for layer in layers]
        uniform = np.log(visible)
    else:
        wanted = targets(kind, tokens)
        chosen = wanted.any(-1)
        by_query = [_on(layer, wanted) for layer in layers]
        uniform = wanted.sum(-1) / visible
    count = int(chosen.sum())
    share = chosen / count if count else np.full(tokens.shape, np.nan)
    values = np.stack([np.einsum("bhq,bq->h", layer, share) for layer in by_query])
    return _Measured(values, float((uniform * share).sum()), count)


def _p_untrained(kind: str, values: np.ndarray, untrained: np.ndarray) -> np.ndarray:
    """Probability `[L, H]` that one more untrained head of the layer scores this high (for "entropy": this low)."""
    sign, heads = (-1 if kind == "entropy" else 1), untrained.shape[1]  # a low entropy stands out
    spread = np.maximum(untrained.std(axis=1, ddof=1, keepdims=True), _LEAST_SPREAD) * np.sqrt(1 + 1 / heads)
    return stats.t.sf(sign * (values - untrained.mean(axis=1, keepdims=True)) / spread, heads - 1)


def _known(kinds: str | Sequence[str]) -> tuple[str, ...]:
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"kinds = {unknown}: expected one or more of {', '.join(KINDS)}")
    return kinds


def _untrained(untrained: Array | Sequence[Array], tokens: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    layers = _layers(untrained, tokens, "untrained")
    if len(layers) != len(like) or layers[0].shape[1] < 2:
        raise ValueError(
            f"untrained has {len(layers)} layers of {layers[0].shape[1]} heads: expected {len(like)} of 2 or more; "
            "concatenate several initializations along the head axis"
        )
    return layers


def _layers(patterns: Array | Sequence[Array], tokens: np.ndarray, argument: str) -> list[np.ndarray]:
    """Check the weights and return them by layer, `[B, H, T, T]` each."""
    layers = [np.asarray(layer) for layer in patterns]
    layers = [layer.astype(np.result_type(layer.dtype, np.float32), copy=False) for layer in layers]
    batch, length = tokens.shape
    for layer in layers:
        if layer.ndim != 4 or layer.shape != (batch, layers[0].shape[1], length, length):
            raise ValueError(
                f"{argument} has a layer {list(layer.shape)}: expected [B, H, T, T] of tokens {list(tokens.shape)}, "
                "with as many heads in every layer"
            )
        if not np.isfinite(layer).all() or np.triu(layer, 1).any():
            raise ValueError(f"{argument} has weights that are not finite or not causal: expected causal attention")
        if layer.min(initial=0) < -1e-3 or layer.sum(axis=-1).max(initial=0) > 1.01:
            raise ValueError(f"{argument} has weights below 0, or rows that sum to more than 1: use see.shares first")
    if not layers:
        raise ValueError(f"{argument} has no layers: expected [L, B, H, T, T]")
    return layers
