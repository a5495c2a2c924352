"""Scores of attention heads by their patterns, with null models.

Every head has some weight on the keys of a role: uniform attention gives the previous token 1/i, and random heads
favour or avoid equal tokens by chance. So each score comes with p-values against three null models.
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
NULLS = ("uniform", "untrained", "matched")
_BY_TOKEN = ("duplicate", "induction")  # targets of the other kinds follow from the positions
_DIGITS = 6  # decimals of compared weights, since equal weights differ by rounding


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of L layers of H heads, and their p-values.

    Attributes:
      values: by kind, `[L, H]`: weight on the targets, 0 to 1, mean over the queries with targets; for "entropy" nats,
        mean over all queries but the first. NaN without targets.
      mul: by kind but "entropy", `[L, H]`: the share of all attention that lies on targets, see `mul_score`.
      uniform: by kind, the value of uniform causal attention on these tokens.
      p: by null model, then by kind, `[L, H]`: p-values of a larger value (for "entropy": a smaller one) than under
        the null model, multiplied by the number of heads and kinds (Bonferroni). NaN where there is no test.
      count: by kind, the number of queries with targets.
      paths: paths of the L layers.

    >>> p = {"uniform": {"sink": np.array([[1e-4, 1.0]])}}
    >>> found = Scores({"sink": np.array([[0.9, 0.1]])}, {}, {"sink": 0.1}, p, {"sink": 60}, ("block_0/attention",))
    >>> found.heads("sink")
    [(0, 0)]
    >>> print(found)
    sink       0.900 at block_0/attention head 0; uniform 0.100; p = 0.0001 (uniform); 60 queries
    """

    values: dict[str, np.ndarray]
    mul: dict[str, np.ndarray]
    uniform: dict[str, float]
    p: dict[str, dict[str, np.ndarray]]
    count: dict[str, int]
    paths: tuple[str, ...]

    def heads(self, kind: str, alpha: float = 0.01) -> list[tuple[int, int]]:
        """The heads (layer, head) for which all null models are rejected at `alpha`, the clearest first.

        Raises:
          ValueError: that kind was not scored.
        """
        if kind not in self.values:
            raise ValueError(f"kind = {kind!r} was not scored: expected one of {', '.join(self.values)}")
        tests = [p[kind] for p in self.p.values() if kind in p]
        return [at for at in self._ranked(kind) if tests and all(p[at] < alpha for p in tests)]

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
        tests = ", ".join(f"{p[kind][layer, head]:.1g} ({null})" for null, p in self.p.items() if kind in p)
        return (
            f"{self.values[kind][layer, head]:.3f} at {self.paths[layer]} head {head}; "
            f"uniform {self.uniform[kind]:.3f}; p = {tests}; {self.count[kind]} queries"
        )


def scores(
    patterns: Array | Sequence[Array],
    tokens: Int[Array, "B T"],
    kinds: Sequence[str] = KINDS,
    null: str | Sequence[str] = "all",
    *,
    untrained: Array | Sequence[Array] | None = None,
    paths: Sequence[str] | None = None,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
) -> Scores:
    """Score causal attention heads by the keys that they attend to, against null models.

    The null models:

    - "uniform": the weight is spread evenly over the visible keys, which gives an exact value. Wilcoxon's signed-rank
      test, with sequences as the sample.
    - "untrained": the head has random weights. Such heads favour some tokens by chance, the same in all sequences, and
      the test against uniform attention rejects one in twenty. Student's t-test of one further value, with the
      untrained heads of the same layer as the sample.
    - "matched": the weight depends on the positions, not on the tokens. The control is the weight between the same two
      positions in the sequences where they are not a target (Mann-Whitney). For "duplicate" and "induction" only: the
      targets of the other kinds are positions, which leaves no control. If all sequences repeat with one period, p is
      NaN, and no head is found.

    For "uniform" and "matched" 16 sequences suffice for the few hundred heads of a small model; one never does.

    Args:
      patterns: weights of causal self-attention `[L, B, H, T, T]`, or of each layer `[B, H, T, T]`.
      tokens: the tokens attended to.
      kinds: of "previous", "duplicate", "induction", "current", "sink" (see `targets`) and "entropy".
      null: null models to test; "all" for all three, without "untrained" if those weights are missing.
      untrained: weights of the untrained model on the same tokens. Weights of several initializations may be
        concatenated on the axis of heads, which sharpens the test of layers with few heads.
      paths: names of the layers; "layer 0" and so on by default.
      exclude_bos, exclude_current_token: see `mul_score`; they change only `Scores.mul`.

    Raises:
      ValueError: unknown kinds or nulls, shapes that do not fit, weights that are not finite or not causal, "untrained"
        without weights or with one head a layer, or tokens without targets of any kind.

    >>> tokens = np.random.default_rng(0).integers(0, 9, (16, 12))
    >>> previous = np.broadcast_to(np.eye(12, k=-1), (16, 1, 12, 12))
    >>> uniform = np.broadcast_to(np.tri(12) / np.arange(1, 13)[:, None], (16, 1, 12, 12))
    >>> found = scores(np.concatenate([previous, uniform], axis=1)[None], tokens, kinds=["previous", "induction"])
    >>> found.values["previous"].round(3), round(found.uniform["previous"], 3), found.heads("previous")
    (array([[1.   , 0.191]]), 0.191, [(0, 0)])
    """
    tokens = np.asarray(tokens)
    layers = _layers(patterns, tokens, "patterns")
    kinds, nulls = _chosen(kinds, KINDS, "kinds"), _nulls(null, untrained)
    measured = {kind: _measure(layers, tokens, kind) for kind in kinds}
    masks = {kind: targets(kind, tokens) for kind in kinds if kind != "entropy"}
    scored = [kind for kind in kinds if measured[kind].queries.any()]
    if not scored:
        raise ValueError(f"tokens {list(tokens.shape)} have no target of {', '.join(kinds)}: give longer sequences")
    p = _tests(nulls, measured, layers, tokens, masks, untrained)
    tests = len(scored) * len(layers) * layers[0].shape[1]
    options = {"exclude_bos": exclude_bos, "exclude_current_token": exclude_current_token}
    return Scores(
        values={kind: measured[kind].mean() for kind in kinds},
        mul={kind: np.stack([mul_score(layer, mask, **options) for layer in layers]) for kind, mask in masks.items()},
        uniform={kind: measured[kind].mean_uniform() for kind in kinds},
        p={name: {kind: np.minimum(1, tests * each) for kind, each in by_kind.items()} for name, by_kind in p.items()},
        count={kind: int(measured[kind].queries.sum()) for kind in kinds},
        paths=tuple(paths or (f"layer {layer}" for layer in range(len(layers)))),
    )


def _tests(nulls, measured, layers, tokens, masks, untrained) -> dict[str, dict[str, np.ndarray]]:
    """p-values `[L, H]`, not corrected, by null model and kind."""
    p = {}
    if "uniform" in nulls:
        p["uniform"] = {kind: _p_uniform(measure) for kind, measure in measured.items()}
    if "untrained" in nulls:
        others = _untrained(untrained, tokens, layers)
        p["untrained"] = {kind: _p_untrained(measured[kind], _measure(others, tokens, kind)) for kind in measured}
    if "matched" in nulls:
        p["matched"] = {kind: _p_matched(layers, masks[kind]) for kind in measured if kind in _BY_TOKEN}
    return p


def shares(pattern: Float[Array, "*B H Q K"]) -> Float[Array, "*B H Q K"]:
    """The share of each key in the absolute weights of a query, |p| / Σ|p|, as Ali et al. 2024 show for Mamba.

    What a recurrence reads may be negative, and of any sum: scores and pages are of weights that sum to 1. A query that
    reads nothing has zeros.

    >>> shares(jnp.array([[[1.0, 0.0], [3.0, -1.0]]]))
    Array([[[1.  , 0.  ],
            [0.75, 0.25]]], dtype=float32)
    """
    size = jnp.abs(pattern)
    total = size.sum(axis=-1, keepdims=True)
    return size / jnp.where(total > 0, total, 1)


def targets(kind: str, tokens: Int[Array, "B T"]) -> Bool[np.ndarray, "B T T"]:
    """The keys that a head of a kind attends to, by query.

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


def mul_score(
    pattern: Float[Array, "B H T T"],
    wanted: Bool[Array, "B T T"],
    *,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
) -> Float[np.ndarray, "H"]:
    """The share `[H]` of a layer's attention on the wanted keys: TransformerLens' `detect_head(error_measure="mul")`.

    Queries without a wanted key count, so a perfect induction head has 1/2 on a text that is said twice. `exclude_bos`
    ignores weight on the first key, `exclude_current_token` weight on the query's position.
    """
    counted = np.ones(pattern.shape[-2:], bool)
    counted[:, 0] &= not exclude_bos
    counted[np.diag_indices_from(counted)] &= not exclude_current_token
    everywhere = np.broadcast_to(counted, wanted.shape)
    return (_on(pattern, wanted & counted).sum(-1) / _on(pattern, everywhere).sum(-1)).mean(0)


def _on(pattern: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The weight `[B, H, T]` of each query on its wanted keys `[B, T, T]`."""
    return np.vecdot(pattern, wanted[:, None].astype(pattern.dtype)).astype(np.float64)


class _Measured(NamedTuple):
    """Scores of one kind in each sequence."""

    values: np.ndarray  # [L, B, H], mean over the queries of a sequence that have targets
    uniform: np.ndarray  # [B], the same for uniform causal attention
    queries: np.ndarray  # [B], the number of queries with targets
    sign: int  # −1 for entropy, where small values stand out, otherwise 1

    def mean(self) -> np.ndarray:
        """The mean over all queries with targets, `[L, H]`."""
        if not self.queries.any():
            return np.full_like(self.values[:, 0], np.nan)
        return np.average(self.values, axis=1, weights=self.queries)

    def mean_uniform(self) -> float:
        return float(np.average(self.uniform, weights=self.queries)) if self.queries.any() else np.nan


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
    queries = chosen.sum(-1)
    share = chosen / np.maximum(queries, 1)[:, None]
    values = np.stack([np.einsum("bhq,bq->bh", layer, share) for layer in by_query])
    return _Measured(values, (uniform * share).sum(-1), queries, -1 if kind == "entropy" else 1)


def _p_uniform(measured: _Measured) -> np.ndarray:
    there = measured.queries > 0
    if there.sum() < 2:
        return np.full_like(measured.values[:, 0], np.nan)
    excess = measured.sign * (measured.values - measured.uniform[:, None])[:, there]
    return stats.wilcoxon(excess.round(_DIGITS), alternative="greater", zero_method="zsplit", axis=1).pvalue


def _p_untrained(measured: _Measured, untrained: _Measured) -> np.ndarray:
    """Probability that one more untrained head of the layer has such a score."""
    others = measured.sign * untrained.mean()
    heads = others.shape[1]
    spread = np.maximum(others.std(axis=1, ddof=1, keepdims=True), 10.0**-_DIGITS) * np.sqrt(1 + 1 / heads)
    return stats.t.sf((measured.sign * measured.mean() - others.mean(axis=1, keepdims=True)) / spread, heads - 1)


def _p_matched(layers: Sequence[Array], wanted: np.ndarray) -> np.ndarray:
    control = ~wanted
    sequences = control.sum(0)  # [T, T], the number with a pair of positions as control
    matched = wanted & (sequences > 0)
    there = matched.any((1, 2))
    if there.sum() < 2:
        return np.full((len(layers), layers[0].shape[1]), np.nan)
    matched = (matched / np.maximum(matched.any(-1).sum(-1), 1)[:, None, None])[there]
    p = []
    for layer in layers:
        elsewhere = np.einsum("bhqk,bqk->hqk", layer, control.astype(layer.dtype)) / np.maximum(sequences, 1)
        on_targets = _on(layer[there], matched).sum(-1).round(_DIGITS)
        on_controls = _on(elsewhere, matched).sum(-1).round(_DIGITS)
        p.append(stats.mannwhitneyu(on_targets, on_controls, alternative="greater").pvalue)
    return np.stack(p)


def _chosen(names: str | Sequence[str], known: Sequence[str], argument: str) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(f"{argument} = {unknown}: expected one or more of {', '.join(known)}")
    return names


def _nulls(null: str | Sequence[str], untrained: Array | Sequence[Array] | None) -> tuple[str, ...]:
    if null == "all":
        return tuple(name for name in NULLS if name != "untrained" or untrained is not None)
    names = _chosen(null, NULLS, "null")
    if "untrained" in names and untrained is None:
        raise ValueError("null = 'untrained' needs untrained=, the weights of the same model before training")
    return names


def _untrained(untrained: Array | Sequence[Array], tokens: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    layers = _layers(untrained, tokens, "untrained")
    if len(layers) != len(like) or layers[0].shape[1] < 2:
        raise ValueError(
            f"untrained has {len(layers)} layers of {layers[0].shape[1]} heads: expected {len(like)} of 2 or more; "
            "concatenate several initializations on the axis of heads"
        )
    return layers


def _layers(patterns: Array | Sequence[Array], tokens: np.ndarray, argument: str) -> list[np.ndarray]:
    """The weights of each layer `[B, H, T, T]`, checked."""
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
    if not layers:
        raise ValueError(f"{argument} has no layers: expected [L, B, H, T, T]")
    return layers
