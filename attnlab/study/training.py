"""At the start the gradient goes to V and W; that of Q and K is far smaller, and grows as attention learns.

Document 004 asks how Q, K, V and W are trained. All four get their gradient from the one loss, by the chain rule. Those
of Q and K pass through the softmax: while values carry little, where to look makes little difference, and their
gradient is small. A small GPT on characters is followed through a run: the norm of the gradient of each of the four,
layer by layer, over the norm of the matrix; and how far each has moved, over its norm at the start. The optimizer is
Adam, which divides gradients by their size: what is far behind in gradient need not be so in movement.
"""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.nn import GPT
from attnlab.study import fitting
from attnlab.study.report import Options, Verdict, table

READS_TEXT = True
MATRICES = {"Q": "query", "K": "key", "V": "value", "W": "out"}
LAYERS, CONTEXT = 2, 64


def measure(options: Options) -> list[dict]:
    """A row for each seed, step looked at, layer and matrix."""
    seeds, steps = (2, 300) if options.fast else (5, 2000)
    text = fitting.read(options.path)
    rows = []
    for seed in range(seeds):
        model = GPT(text.tokenizer.vocab_size, LAYERS, 4, 64, CONTEXT, use_bias=False, positions="rotary")
        first = {}
        looks = set(np.unique(np.logspace(0, np.log10(steps), 40).round().astype(int) - 1))

        def watch(step, params, gradient, seed=seed, looks=looks, first=first):
            first.setdefault("params", params)
            if step in looks:
                for layer in range(LAYERS):
                    for matrix, name in MATRICES.items():
                        trees = (gradient, params, first["params"])
                        g, w, start = (tree[f"block_{layer}"]["attention"][name]["kernel"] for tree in trees)
                        norms = {"gradient": float(jnp.linalg.norm(g)), "weight": float(jnp.linalg.norm(w))}
                        norms["moved"] = float(jnp.linalg.norm(w - start) / jnp.linalg.norm(start))
                        rows.append({"seed": seed, "step": step + 1, "layer": layer, "matrix": matrix} | norms)

        batches = text.batches(CONTEXT, 12, seed)
        params = jax.jit(model.init)(jax.random.key(seed), batches(0).tokens[:1, :-1])["params"]
        fitting.fit(fitting.text_loss(model), params, batches, steps, learning_rate=3e-3, weight_decay=0.1, watch=watch)
    return rows


def _relative(rows, layer, matrix):
    """{step: gradient over weight, the mean over seeds}."""
    chosen = [
        r | {"relative": r["gradient"] / r["weight"]} for r in rows if (r["layer"], r["matrix"]) == (layer, matrix)
    ]
    return {step: float(np.mean(v)) for step, v in table(chosen, "step", "relative").items()}


def _ratios(rows, layer):
    """{step: (Q and K) over (V and W)}, of gradients relative to their weights."""
    q, k, v, w = (_relative(rows, layer, matrix) for matrix in MATRICES)
    return {step: (q[step] + k[step]) / (v[step] + w[step]) for step in q}


def judge(rows: list[dict]) -> Verdict:
    """All four get a gradient at the first step; that of Q and K is a twentieth at most, and grows tenfold later."""
    parts = []
    last = max(row["step"] for row in rows)
    for layer in range(LAYERS):
        least = min(next(iter(_relative(rows, layer, matrix).values())) for matrix in MATRICES)
        ratios = _ratios(rows, layer)
        first, top = next(iter(ratios.values())), max(ratios, key=ratios.get)
        moved = {
            matrix: np.mean([r["moved"] for r in rows if (r["step"], r["layer"], r["matrix"]) == (last, layer, matrix)])
            for matrix in MATRICES
        }
        parts += [
            (least > 0, f"layer {layer}: at the first step each of Q, K, V, W gets a gradient"),
            (
                first < 0.05,
                f"layer {layer}: that of Q and K is {first:.3f} of that of V and W, over the weights",
            ),
            (
                ratios[top] > 10 * first and top > last / 10,
                f"layer {layer}: it grows to {ratios[top]:.2f} of it, at step {top} of {last}; at the end Q, K, V, W "
                f"have moved by {', '.join(f'{distance:.1f}' for distance in moved.values())} times their first size",
            ),
        ]
    return Verdict.of(*parts)


def draw(rows: list[dict]) -> Figure:
    """The gradients over the steps, a panel for each layer."""
    panels = {}
    for layer in range(LAYERS):
        series = {}
        for matrix in MATRICES:
            relative = _relative(rows, layer, matrix)
            series[matrix] = (list(relative), list(relative.values()))
        panels[f"layer {layer}"] = {
            "series": series,
            "x": "step (updates)",
            "y": "‖gradient‖ / ‖weight‖",
            "log": "xy",
            "markers": False,
        }
    finding = "The gradient goes to V and W first; that of Q and K starts far below, and grows"
    return plots.panels(panels, judge(rows).title(finding))
