"""Dividing q·k by √d_k, and by nothing else, keeps the softmax's gradient the same at any width.

Queries and keys are drawn with components of variance 1, so q·k has variance d_k. For n = 50 keys the Frobenius norm
of the softmax's Jacobian, ∂p_i/∂s_j = p_i (δ_ij − p_j), is measured over widths from 1 to 10⁴, with unscaled scores,
scores divided by √d_model (six heads: d_model = 6 d_k), and scores divided by √d_k. In closed form its square is

    ‖J‖² = Σ p² − 2 Σ p³ + (Σ p²)²

Unscaled, the norm is not monotone: it rises as the softmax departs from the uniform distribution (norm about 1/√n),
and falls once one key takes nearly all of the weight.
"""

import jax
import numpy as np
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.study.report import Options, Verdict, table

KEYS = 50
WIDTHS = np.unique(np.logspace(0, 4, 20).round().astype(int))
HEADS = 6
SCALES = {"none": lambda d: 1.0, "√d_model": lambda d: (HEADS * d) ** -0.5, "√d_k": lambda d: d**-0.5}


def jacobian_norm(p):
    """Frobenius norm of the softmax's Jacobian at output `p` `[..., n]`."""
    squares, cubes = (p**2).sum(-1), (p**3).sum(-1)
    return np.sqrt(np.maximum(squares - 2 * cubes + squares**2, 0))


def measure(options: Options) -> list[dict]:
    """One row per seed, width and scale: the mean norm over simulations, and the variance of the scores."""
    seeds, simulations = (2, 150) if options.fast else (5, 1000)
    advance = options.progress(seeds * int(WIDTHS.sum()))
    rows = []
    for seed in range(seeds):
        draw = np.random.default_rng(seed)
        for width in WIDTHS:
            scores = np.concatenate([_scores(draw, 50, int(width)) for _ in range(-(-simulations // 50))])
            for name, scale in SCALES.items():
                scaled = scores * scale(width)
                norm = jacobian_norm(np.asarray(jax.nn.softmax(scaled, axis=-1), np.float64))
                rows.append(
                    {
                        "seed": seed,
                        "d_k": int(width),
                        "scale": name,
                        "variance": float(scaled.var()),
                        "jacobian_norm": float(norm.mean()),
                    }
                )
            advance(int(width))  # drawing queries and keys takes most of the time
    return rows


def _scores(draw, simulations, width):
    """Products q·k `[simulations, KEYS]`; products that share a query are not independent."""
    q = draw.standard_normal((simulations, width), np.float32)
    k = draw.standard_normal((simulations, KEYS, width), np.float32)
    return np.einsum("sd,skd->sk", q, k)


def judge(rows: list[dict]) -> Verdict:
    """Held if the variance grows as d_k, only √d_k keeps the norm constant, and unscaled the norm rises, then falls."""
    norms, variances = (
        {
            name: {d: np.mean(v) for d, v in table([r for r in rows if r["scale"] == name], "d_k", value).items()}
            for name in SCALES
        }
        for value in ("jacobian_norm", "variance")
    )
    slope = np.polyfit(*np.log([list(variances["none"]), list(variances["none"].values())]), 1)[0]
    unscaled, wide = norms["none"], {d: v for d, v in norms["√d_k"].items() if d >= 10}
    top = max(unscaled, key=unscaled.get)
    first, last = min(unscaled), max(unscaled)
    spread = max(wide.values()) / min(wide.values()) - 1
    ratio = np.mean([norms["√d_model"][d] / norms["√d_k"][d] for d in wide])
    return Verdict.of(
        (abs(slope - 1) < 0.05, f"the variance of q·k grows as d_k^{slope:.3f}"),
        (spread < 0.1, f"divided by √d_k the norm varies by {100 * spread:.1f} % from d_k = 10 to 10⁴"),
        (
            first < top < last and unscaled[top] > 1.2 * unscaled[first],
            f"unscaled it first rises, from {unscaled[first]:.3f} to {unscaled[top]:.3f} at d_k = {top}",
        ),
        (unscaled[last] < unscaled[top] / 3, f"and then falls to {unscaled[last]:.3f} at d_k = {last}"),
        (ratio < 0.8, f"divided by √d_model it is {ratio:.2f} of that: too flat a softmax for six heads"),
    )


def draw(rows: list[dict]) -> Figure:
    """Norm of the softmax's gradient, and variance of the scores, against the width, on logarithmic axes.

    A flat curve means that the width does not matter.
    """

    def series(value):
        means = {}
        for name in SCALES:
            grouped = table([r for r in rows if r["scale"] == name], "d_k", value)
            means["unscaled" if name == "none" else f"divided by {name}"] = (
                list(grouped),
                [np.mean(v) for v in grouped.values()],
            )
        return means

    width = "d_k, width of queries and keys (features)"
    return plots.panels(
        {
            "gradient of the softmax": {
                "series": series("jacobian_norm"),
                "x": width,
                "y": "‖Jacobian‖, Frobenius (per unit of score)",
                "log": "xy",
            },
            "the scores themselves": {
                "series": series("variance"),
                "x": width,
                "y": "variance of a score",
                "log": "xy",
            },
        },
        judge(rows).title(
            "Unscaled, the softmax's gradient rises, then vanishes with the width; divided by √d_k it is constant"
        ),
    )
