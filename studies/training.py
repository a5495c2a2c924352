"""At the start the gradient goes to V and W; that of Q and K is far smaller, and grows as attention learns.

Q, K and V are an attention layer's projections, W is its output projection. All four matrices get their gradient from
the same loss, by the chain rule. The gradients of Q and K pass through the softmax: as long as the values carry little
information, it hardly matters which keys are attended to, and these gradients are small. A small character GPT is
followed through training: for each matrix and layer, the gradient norm relative to the norm of the matrix, and the
distance moved relative to its initial norm. The optimizer is Adam, which divides gradients by their size, so a small
gradient does not mean a small update.
"""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.nn import GPT
from attnlab.study import fitting
from attnlab.study.report import Options, Verdict, table
from attnlab.training.state import token_losses

READS_TEXT = True
MATRICES = {"Q": "query", "K": "key", "V": "value", "W": "out"}
LAYERS, CONTEXT = 2, 64
FAST, FULL = fitting.Size(seeds=2, steps=300), fitting.Size(seeds=5, steps=2000)


def measure(options: Options) -> list[dict]:
    """One row per seed, sampled step, layer and matrix."""
    seeds, steps = FAST if options.fast else FULL
    text = fitting.read(options.path, least=CONTEXT + 1)
    advance = options.progress(seeds * steps)
    rows = []
    for seed in range(seeds):
        sizes = {"num_layers": LAYERS, "num_heads": 4, "width": 64, "context": CONTEXT}
        model = GPT.of(vocab_size=text.tokenizer.vocab_size, **sizes, attention={"qk_norm": False})
        first = {}
        looks = set(np.unique(np.logspace(0, np.log10(steps), 40).round().astype(int) - 1))

        def watch(step, params, gradient, seed=seed, looks=looks, first=first):
            first.setdefault("params", params)
            if step in looks:
                for row in _norms(params, gradient, first["params"]):
                    rows.append({"seed": seed, "step": step + 1} | row)

        batches = text.batches(CONTEXT, 12, seed)
        params = jax.jit(model.init)(jax.random.key(seed), batches(0).tokens[:1, :-1])["params"]
        loss = text_loss(model)
        fitting.fit(loss, params, batches, steps, learning_rate=3e-3, weight_decay=0.1, watch=watch, advance=advance)
    return rows


def text_loss(model: GPT):
    """The function `loss(params, batch)`, in nats per token."""
    return lambda params, batch: token_losses(model, params, batch).mean()


def _norms(params, gradient, first):
    """For each layer and matrix, the norms of gradient and weights, and the weights' relative change since `first`."""
    for layer in range(LAYERS):
        for matrix, name in MATRICES.items():
            trees = (gradient, params, first)
            g, w, start = (tree[f"block_{layer}"]["attention"][name]["kernel"] for tree in trees)
            norms = {"gradient": float(jnp.linalg.norm(g)), "weight": float(jnp.linalg.norm(w))}
            norms["moved"] = float(jnp.linalg.norm(w - start) / jnp.linalg.norm(start))
            yield {"layer": layer, "matrix": matrix} | norms


def _relative(rows, layer, matrix):
    """For each step, the gradient's norm divided by the weights' norm, averaged over seeds."""
    chosen = [
        r | {"relative": r["gradient"] / r["weight"]} for r in rows if (r["layer"], r["matrix"]) == (layer, matrix)
    ]
    return {step: float(np.mean(v)) for step, v in table(chosen, "step", "relative").items()}


def _ratios(rows, layer):
    """For each step, the relative gradients of Q and K divided by the relative gradients of V and W."""
    q, k, v, w = (_relative(rows, layer, matrix) for matrix in MATRICES)
    return {step: (q[step] + k[step]) / (v[step] + w[step]) for step in q}


def judge(rows: list[dict]) -> Verdict:
    """Held if all matrices get gradients at once, and the ratio of Q, K to V, W starts below 1/20 and grows tenfold."""
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
                f"layer {layer}: relative to the weights, that of Q and K is {first:.3f} of that of V and W",
            ),
            (
                ratios[top] > 10 * first and top > last / 10,
                f"layer {layer}: this ratio grows to {ratios[top]:.2f}, at step {top} of {last}; at the end Q, K, V, W "
                f"have moved by {', '.join(f'{distance:.1f}' for distance in moved.values())} times their initial norm",
            ),
        ]
    return Verdict.of(*parts)


def draw(rows: list[dict]) -> Figure:
    """Norm of each matrix's gradient divided by the matrix's norm, against training step, one panel per layer.

    Both axes are logarithmic: the curves of Q and K start far below the curves of V and W, and approach them.
    """
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
