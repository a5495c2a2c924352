"""Random attention alone loses rank doubly exponentially; skips stop this, a causal mask slows it, MLPs do neither.

Twelve layers of one head, without norms or biases, get random weights that keep the size of a vector (LeCun's), and
random tokens. By layer, the study measures the relative distance to a matrix 1xᵀ whose rows are equal, in the composite
norm √(‖·‖₁ ‖·‖∞) of Dong, Cordonnier and Loukas (2021, "Attention is not all you need"), unmasked like theirs. Here x
is the mean token, and the distance at most twice that of the nearest 1xᵀ: ‖I − 11ᵀ/T‖ < 2 in both norms. Doubly
exponential means that the logarithm of the distance triples with each layer. The exact oracle is the bound of the
theorem by layer, ‖res(SA(X))‖ ≤ 4 γ ‖W_QK‖₁ ‖W_VO‖₁,∞ / √d ‖res(X)‖³, derived in `log_bound`. It holds where the logits
of each query, apart from what all queries share, differ by at most 1.256; γ depends on the attention. The controls are
the same layers with skips, with MLPs (ReLU, no skips) and with both; the causal mask, outside the theorem, is separate.

Floats end at 10⁻³⁰⁸, or at 10⁻¹⁶ for a difference of tokens, so tokens are kept as a centre, deviations from it, and
the logarithm of the deviations' size: all twelve layers are exact to rounding.
"""

from typing import NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.nn import Mlp, MultiHeadAttention
from attnlab.results.statistics import Interval
from attnlab.study.report import Options, Verdict

LAYERS, LENGTH, WIDTH = 12, 32, 64
KINDS = ("attention alone", "with MLPs", "with skips", "with skips and MLPs", "causal")
ALONE, MLPS, SKIPS, BOTH, CAUSAL = KINDS
SPREAD = 1.256  # largest x with eˣ ≤ 1 + 2x, which the theorem's proof uses
SHOWN = -40  # the lowest power of ten in the figure


class Size(NamedTuple):
    """Size of the study: the number of random models."""

    seeds: int


FAST, FULL = Size(12), Size(48)


class Tokens(NamedTuple):
    """Tokens X = 1 centreᵀ + exp(log_size) deviations."""

    centre: np.ndarray  # float64 [F]
    deviations: np.ndarray  # float64 [T, F], of composite norm 1 and mean 0
    log_size: float  # logarithm of the composite norm of X − 1 centreᵀ

    @classmethod
    def of(cls, centre: np.ndarray, deviations: np.ndarray, log_size: float) -> "Tokens":
        """Move the centre to the mean, and scale the deviations to norm 1."""
        mean = deviations.mean(0)
        size = norm(deviations - mean)
        return cls(centre + np.exp(log_size) * mean, (deviations - mean) / size, log_size + np.log(size))

    def log_distance(self) -> float:
        """Logarithm of the relative distance ‖X − 1 centreᵀ‖ / ‖X‖."""
        return self.log_size - np.log(norm(self.centre + np.exp(self.log_size) * self.deviations))


class Weights(NamedTuple):
    """Weights of a layer."""

    query_key: np.ndarray  # W_Q W_Kᵀ / √d [F, F]
    value_out: np.ndarray  # W_V W_O [F, F]
    up: np.ndarray  # [F, 4F]
    down: np.ndarray  # [4F, F]


def norm(x: np.ndarray) -> float:
    """The composite norm √(‖x‖₁ ‖x‖∞), with the largest column sum and the largest row sum of absolute values."""
    return float(np.sqrt(np.linalg.norm(x, 1) * np.linalg.norm(x, np.inf)))


def draw_weights(seed: int) -> tuple[np.ndarray, list[Weights]]:
    """Random tokens `[LENGTH, WIDTH]` and the random weights of all layers."""
    keys = jax.random.split(jax.random.key(seed), 2 * LAYERS + 1)
    x = jax.random.normal(keys[0], (LENGTH, WIDTH))
    attention = MultiHeadAttention(num_heads=1, use_bias=False)
    mlp = Mlp(activation="relu", use_bias=False)
    layers = []
    for layer in range(LAYERS):
        projections = attention.init(keys[2 * layer + 1], x[None])["params"]
        q, k, v, out = (np.asarray(projections[n]["kernel"], np.float64) for n in ("query", "key", "value", "out"))
        fed = mlp.init(keys[2 * layer + 2], x[None])["params"]
        up, down = (np.asarray(fed[name]["kernel"], np.float64) for name in ("up", "down"))
        layers.append(Weights(q[:, 0] @ k[:, 0].T / q.shape[-1] ** 0.5, v[:, 0] @ out[0], up, down))
    return np.asarray(x, np.float64), layers


def attend(tokens: Tokens, weights: Weights) -> tuple[np.ndarray, np.ndarray]:
    """Tokens averaged by unmasked attention, before W_VO: centre `[F]`, and deviations divided by exp(3 log_size).

    Let X = 1xᵀ + sR. Up to a constant, query i has logits a + s²E_i with a = s R W_QKᵀ x and E = R W_QK Rᵀ. With
    q = softmax(a), the weights are 1qᵀ + s²D and the outputs are 1(x + sRᵀq)ᵀ + s³DR: the theorem's cube is s³.
    """
    s, R = np.exp(tokens.log_size), tokens.deviations
    q, E = _shared(tokens, weights)
    x = s * s * E
    if np.abs(x).max() > 1:  # here the difference from q loses few digits
        D = (_softmax(x + np.log(np.maximum(q, np.finfo(float).tiny))) - q) / (s * s)
    else:
        grown = np.where(x == 0, E, E * np.expm1(x) / np.where(x == 0, 1, x))  # (exp(s²E) − 1) / s²
        mean = grown @ q
        D = q * (grown - mean[:, None]) / (1 + s * s * mean)[:, None]
    return tokens.centre + s * (q @ R), D @ R


def _softmax(logits):
    """Softmax along the last axis."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def _shared(tokens, weights):
    """q `[T]`, the attention weights shared by all queries, and E `[T, T]`; `attend` defines both."""
    R = tokens.deviations
    a = np.exp(tokens.log_size) * (R @ (weights.query_key.T @ tokens.centre))
    return _softmax(a), R @ weights.query_key @ R.T


def attend_causally(tokens: Tokens, weights: Weights) -> np.ndarray:
    """Deviations `[T, F]` after causal attention, before W_VO, divided by exp(log_size); the centre does not change."""
    s, R = np.exp(tokens.log_size), tokens.deviations
    logits = s * (R @ (weights.query_key.T @ tokens.centre)) + s * s * (R @ weights.query_key @ R.T)
    return _softmax(np.where(np.tri(len(R), dtype=bool), logits, -np.inf)) @ R


def feed(tokens: Tokens, weights: Weights) -> tuple[np.ndarray, np.ndarray]:
    """The MLP's output: centre `[F]`, and deviations `[T, F]` divided by exp(log_size), without cancellation."""
    u, change = tokens.centre @ weights.up, tokens.deviations @ weights.up
    with np.errstate(divide="ignore", over="ignore"):  # infinite: no unit changes sign
        least = u / np.exp(tokens.log_size)
    change = np.where(u > 0, np.maximum(change, -least), np.maximum(change + least, 0))  # from relu(u), divided by s
    return np.maximum(u, 0) @ weights.down, change @ weights.down


def apply(kind: str, tokens: Tokens, weights: Weights) -> Tokens:
    """The tokens after a layer of a kind."""
    skips, size = kind in (SKIPS, BOTH), tokens.log_size
    if kind == CAUSAL:
        return Tokens.of(tokens.centre @ weights.value_out, attend_causally(tokens, weights) @ weights.value_out, size)
    centre, deviations = (x @ weights.value_out for x in attend(tokens, weights))
    if skips:
        tokens = Tokens.of(tokens.centre + centre, tokens.deviations + np.exp(2 * size) * deviations, size)
    else:
        tokens = Tokens.of(centre, deviations, 3 * size)
    if kind in (MLPS, BOTH):
        centre, deviations = feed(tokens, weights)
        if skips:
            centre, deviations = tokens.centre + centre, tokens.deviations + deviations
        tokens = Tokens.of(centre, deviations, tokens.log_size)
    return tokens


def log_bound(tokens: Tokens, weights: Weights) -> tuple[float, float]:
    """The logarithm of the proof's bound on ‖res‖ after a layer of attention alone, and the spread, assumed ≤ 1.256.

    Let δ_i be the largest difference in row i of s²E. Weights p_ij are within 2δ_i q_j of q_j, because eˣ ≤ 1 + 2x up
    to x = 1.256. So the row sums of P − 1qᵀ are at most 2 max δ and its column sums 2 max q Σδ; their product is
    (2 γ max δ)² with γ² = max q Σδ / max δ. Finally, max δ ≤ 2 ‖W_QK‖₁ ‖res(X)‖² / √d.
    """
    q, E = _shared(tokens, weights)
    spread = E.max(-1) - E.min(-1)
    gamma = np.sqrt(spread.sum() / spread.max() * q.max())
    constant = 4 * gamma * np.linalg.norm(weights.query_key, 1) * norm(weights.value_out)  # W_QK holds 1 / √d
    return float(np.log(constant) + 3 * tokens.log_size), float(np.exp(2 * tokens.log_size) * spread.max())


def measure(options: Options) -> list[dict]:
    """One row per seed, kind and layer, layer 0 being the input; logarithms to base 10."""
    seeds = (FAST if options.fast else FULL).seeds
    advance = options.progress(seeds * len(KINDS))
    rows = []
    for seed in range(seeds):
        x, layers = draw_weights(seed)
        for kind in KINDS:
            tokens = Tokens.of(np.zeros(WIDTH), x, 0.0)
            bound = {}
            for layer in range(LAYERS + 1):
                sizes = {"log distance": tokens.log_distance(), "log residual": tokens.log_size}
                measured = {name: float(value / np.log(10)) for name, value in sizes.items()}
                rows.append({"seed": seed, "kind": kind, "layer": layer} | measured | bound)
                if layer < LAYERS:
                    if kind == ALONE:
                        log, spread = log_bound(tokens, layers[layer])
                        bound = {"log bound": float(log / np.log(10)), "spread": spread}
                    tokens = apply(kind, tokens, layers[layer])
            advance()
    return rows


def _logs(rows, kind, value) -> np.ndarray:
    """One of the logarithms for a kind `[seeds, layers]`; NaN for layers without it."""
    logs = {(r["seed"], r["layer"]): r.get(value, np.nan) for r in rows if r["kind"] == kind}
    seeds, layers = (sorted(set(numbers)) for numbers in zip(*logs))
    return np.array([[logs[seed, layer] for layer in layers] for seed in seeds])


def slopes(logs: np.ndarray) -> np.ndarray:
    """Slope of log r[l+1] against log r[l] `[seeds, L − 1]`, from log r `[seeds, L + 1]`; 3 is doubly exponential."""
    fall = np.diff(logs, axis=1)
    return fall[:, 1:] / fall[:, :-1]


def judge(rows: list[dict]) -> Verdict:
    """Held if attention alone has the bound's slope, 3, and stays within the bound, and skips stop the decay."""
    logs = {kind: _logs(rows, kind, "log distance") for kind in KINDS}
    last = {kind: Interval.of(slopes(logs[kind])[:, -3:].mean(1)) for kind in (ALONE, MLPS)}
    first = Interval.of(logs[ALONE][:, 1] - logs[ALONE][:, 0])
    bounded = [r for r in rows if "spread" in r]
    within = [r for r in bounded if r["spread"] <= SPREAD]
    exceeded = sum(r["log residual"] > r["log bound"] for r in within)
    slack = np.median([r["log bound"] - r["log residual"] for r in within]) if within else np.nan
    early = sorted({r["layer"] for r in bounded if r["spread"] > SPREAD})
    kept = {kind: Interval.of(logs[kind][:, -1] - logs[kind][:, 0]) for kind in (SKIPS, BOTH)}
    causal = Interval.of(10 ** np.diff(logs[CAUSAL])[:, -6:].mean(1))
    slope = Interval.of(np.median(slopes(logs[CAUSAL])[:, -6:], axis=1))
    return Verdict.of(
        # The slope is only about 3, because the constant differs from layer to layer.
        (
            abs(last[ALONE].mean - 3) < 0.1,
            f"attention alone: slope of log distance by layer {last[ALONE]:.3f} over the last layers, 3 in the bound; "
            f"the first layer multiplies the distance by 10^{first:.2f}, and layer {logs[ALONE].shape[1] - 1} "
            f"ends at 10^{Interval.of(logs[ALONE][:, -1]):,.0f}",
        ),
        (
            len(within) > 0 and exceeded == 0,
            f"the bound, where its assumption holds, is exceeded in {exceeded} of {len(within)} layers (median: "
            f"10^{slack:.1f} times the distance); the assumption fails in {len(bounded) - len(within)} others "
            f"(layers: {', '.join(map(str, early)) or 'none'})",
        ),
        # Halving the distance at each of twelve layers would divide it by 4,096: a division by ten is no such decay.
        (kept[SKIPS].low > -1, f"with skips, {LAYERS} layers multiply the distance by 10^{kept[SKIPS]:.2f}"),
        (kept[BOTH].low > -1, f"with skips and MLPs, by 10^{kept[BOTH]:.2f}"),
        (abs(last[MLPS].mean - 3) < 0.1, f"with MLPs and no skips the slope is {last[MLPS]:.3f} as well"),
        # A slope of 1 is a constant factor per layer: exponential decay, no faster.
        (
            abs(slope.mean - 1) < 0.5 and causal.high < 1,
            f"causal attention decays only exponentially: slope {slope:.2f}, a factor of {causal:.2f} per layer",
        ),
    )


def draw(rows: list[dict]) -> Figure:
    """Distance of the tokens from one another by layer, and the slope of its logarithm from layer to layer.

    Left, a straight fall is exponential decay, and a fall that steepens is doubly exponential; curves end where they
    leave the panel, and bands are standard deviations over seeds. Right, curves are medians over seeds, and bands
    contain the middle half of the seeds.
    """
    distance, slope = {}, {}
    spread = {"distance": {}, "slope": {}}
    for kind in KINDS:
        logs = _logs(rows, kind, "log distance")
        shown = int((logs.mean(0) > SHOWN).sum())
        distance[kind] = (list(range(shown)), list(logs.mean(0)[:shown]))
        spread["distance"][kind] = logs.std(0)[:shown]
        if kind in (ALONE, MLPS, CAUSAL):  # with skips there is no decay to take a slope of
            each = slopes(logs)[:, 1:]  # the first layer's fall is near 0, and a ratio to it can have any size
            slope[kind] = (list(range(2, each.shape[1] + 2)), list(np.median(each, axis=0)))
            low, high = np.percentile(each, [25, 75], axis=0)
            spread["slope"][kind] = (high - low) / 2
    slope["the bound"] = ([2, LAYERS - 1], [3, 3])
    relative = _logs(rows, ALONE, "log distance") - _logs(rows, ALONE, "log residual")
    bound = (_logs(rows, ALONE, "log bound")[:, 1:] + relative[:, 1:]).mean(0)
    shown = int((bound > SHOWN).sum())
    distance["bound, from the layer before"] = (list(range(1, shown + 1)), list(bound[:shown]))
    panels = {
        f"the first {-SHOWN} powers of ten": {
            "series": distance,
            "x": "layer",
            "y": "log₁₀ of the relative distance to equal tokens",
            "spread": spread["distance"],
            "dashed": ("bound, from the layer before",),
        },
        "doubly exponential: 3; exponential: 1": {
            "series": slope,
            "x": "layer",
            "y": "slope of log distance, layer to layer",
            "spread": spread["slope"],
            "dashed": ("the bound",),
        },
    }
    return plots.panels(panels, judge(rows).title("Attention alone cubes the distance at each layer; skips keep it"))
