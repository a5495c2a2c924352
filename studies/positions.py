"""Sinusoidal positions shift by a rotation, but neither fade monotonically nor extrapolate; models need some positions.

Vaswani et al. 2017 chose sinusoids because a shift is a linear map of them, and hoped that models would extrapolate to
longer sequences; Kazemnejad 2019 adds that similarity decays smoothly with distance. There are four measurements. The
largest error of PE(p + k) = R_k PE(p), with R_k a rotation. The similarity PE(p)·PE(p + k) over k. The loss of small
character models, trained on windows of 64 and scored on the same 16 characters at the end of windows of 64, 128 and
256, with each kind of positions and with none: they predict the next character under a causal mask, or masked
characters without one. And whether the models without positions notice a permutation of the characters before the last.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.masks import Causal
from attnlab.nn import Block, LearnedPositions, Mlp, MultiHeadAttention, sinusoidal
from attnlab.nn.config import POSITIONS
from attnlab.ops.score_mods import alibi_slopes
from attnlab.score_mods import ALiBi
from attnlab.study import fitting
from attnlab.study.report import Options, Verdict, table

READS_TEXT = True
FEATURES = 128
CONTEXT, FACTORS, HEADS, WIDTH = 64, (1, 2, 4), 4, 64
SCORED = 16  # how many last characters of a window count: in the shortest window, 48 come before them
MASKED = 0.15  # share of characters to predict if there is no causal mask
FAST, FULL = fitting.Size(seeds=1, steps=110), fitting.Size(seeds=3, steps=2000)


class Reader(nn.Module):
    """A two-block character model like `GPT`, with or without the causal mask."""

    vocab_size: int
    positions: str
    causal: bool

    @nn.compact
    def __call__(self, tokens):
        """Logits `[B, T, V]` for tokens `[B, T]`; token V stands for a masked character."""
        x = WIDTH**0.5 * nn.Embed(self.vocab_size + 1, WIDTH, name="embed")(tokens)
        places = jnp.arange(tokens.shape[1])
        if self.positions == "learned":
            # On the scale of the embeddings: smaller vectors would have no effect.
            x = x + LearnedPositions(CONTEXT, WIDTH, embedding_init=nn.initializers.normal(1.0))(places)
        elif self.positions == "sinusoidal":
            x = x + sinusoidal(places, WIDTH)
        for layer in range(2):
            attention = MultiHeadAttention(
                HEADS,
                mask=Causal() if self.causal else None,
                score_mod=ALiBi(alibi_slopes(HEADS)) if self.positions == "alibi" else None,
                rotary=10_000.0 if self.positions == "rotary" else None,
                parent=None,
            )
            x = Block(attention, Mlp(parent=None), name=f"block_{layer}")(x)
        return nn.Dense(self.vocab_size, name="out")(nn.LayerNorm()(x))


def losses(model: Reader, params, tokens, hidden):
    """Loss in nats `[B, T]` of next characters; without a causal mask, of all characters, those in `hidden` masked."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if not model.causal:
        inputs, targets = jnp.where(hidden, model.vocab_size, inputs), inputs
    return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, inputs), targets)


def measure(options: Options) -> list[dict]:
    """Rows of four kinds, named by `what`: rotation, similarity, shuffle, extrapolation."""
    rows = []
    places = np.asarray(sinusoidal(jnp.arange(400), FEATURES), np.float64)
    for shift in (1, 7, 100):
        rotated = places[:300] @ rotation(shift, FEATURES).T
        rows.append(
            {"what": "rotation", "k": shift, "error": float(np.abs(rotated - places[shift : 300 + shift]).max())}
        )
    for distance in range(101):
        similarity = float(np.mean(np.sum(places[:300] * places[distance : 300 + distance], axis=1))) / (FEATURES / 2)
        rows.append({"what": "similarity", "k": distance, "similarity": similarity})
    seeds, steps = FAST if options.fast else FULL
    text = fitting.read(options.path, least=CONTEXT * FACTORS[-1] + 1)
    advance = options.progress(seeds * 2 * len(POSITIONS) * steps)
    for seed in range(seeds):
        for causal in (True, False):
            for positions in POSITIONS:
                rows += _extrapolation(text, seed, causal, positions, steps, advance)
    return rows


def rotation(shift: int, features: int) -> np.ndarray:
    """The rotation R_k `[features, features]` with PE(p + k) = R_k PE(p): one 2 × 2 block per frequency."""
    angles = shift / 10_000.0 ** (np.arange(0, features, 2) / features)
    matrix = np.zeros((features, features))
    even = np.arange(0, features, 2)
    matrix[even, even] = matrix[even + 1, even + 1] = np.cos(angles)
    matrix[even, even + 1], matrix[even + 1, even] = np.sin(angles), -np.sin(angles)
    return matrix


def _extrapolation(text, seed, causal, positions, steps, advance):
    model = Reader(text.tokenizer.vocab_size, positions, causal)
    windows = text.batches(CONTEXT, 16, seed)

    def batches(step):
        tokens = windows(step).tokens
        return tokens, np.random.default_rng((seed, step)).random((len(tokens), CONTEXT)) < MASKED

    def loss(params, batch):
        tokens, hidden = batch
        guessed = jnp.ones(hidden.shape) if causal else hidden
        return (losses(model, params, tokens, hidden) * guessed).sum() / guessed.sum()

    params = jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, CONTEXT), jnp.int32))
    params = fitting.fit(loss, params, batches, steps, learning_rate=4e-3, weight_decay=0.1, advance=advance)
    mask = "causal" if causal else "no mask"
    if positions == "none":
        yield {"what": "shuffle", "seed": seed, "mask": mask, "change": _change_by_shuffling(model, params, text)}
    longest = CONTEXT * FACTORS[-1]
    held_out = np.concatenate([batch.tokens for batch in text.held_out(longest, 32, 256)])
    hidden = np.random.default_rng(seed).random((len(held_out), longest)) < MASKED
    score = jax.jit(lambda params, tokens, hidden: losses(model, params, tokens, hidden))
    for factor in FACTORS:
        if positions == "learned" and factor > 1:
            continue  # position 64 has no vector: the model raises an error
        length = CONTEXT * factor
        values = np.asarray(score(params, held_out[:, -length - 1 :], hidden[:, -length:]))[:, -SCORED:]
        guessed = np.ones(values.shape) if causal else hidden[:, -SCORED:]
        row = {"what": "extrapolation", "seed": seed, "mask": mask, "positions": positions, "length": length}
        yield row | {"loss": float((values * guessed).sum() / guessed.sum())}


def _change_by_shuffling(model, params, text) -> float:
    """Largest change of the last character's logits when the characters before it are permuted."""
    tokens = text.validation[None, :CONTEXT]
    shuffled = np.random.default_rng(0).permutation(tokens[:, :-1], axis=1)
    shuffled = np.append(shuffled, tokens[:, -1:], axis=1)
    moved = [jax.jit(model.apply)(params, jnp.asarray(x))[0, -1] for x in (tokens, shuffled)]
    return float(jnp.abs(moved[0] - moved[1]).max())


def judge(rows: list[dict]) -> Verdict:
    """Held if the rotation is exact, the similarity is not monotone, and the trained models behave as claimed."""
    error = max(row["error"] for row in rows if row["what"] == "rotation")
    similarity = [row["similarity"] for row in rows if row["what"] == "similarity"]
    first = next(k for k in range(1, len(similarity)) if similarity[k] > similarity[k - 1])
    shuffled = table([row for row in rows if row["what"] == "shuffle"], "mask", "change")
    shuffled = {mask: np.mean(changes) for mask, changes in shuffled.items()}
    loss = _losses(rows)
    longest = CONTEXT * FACTORS[-1]

    def change(mask, positions):
        return loss[mask, positions][longest] - loss[mask, positions][CONTEXT]

    def cost(mask):
        return loss[mask, "none"][CONTEXT] - loss[mask, "rotary"][CONTEXT]

    return Verdict.of(
        (error < 1e-4, f"PE(p + k) is a rotation of PE(p): largest error {error:.0e}, that of float32 angles"),
        (first < 20, f"similarity does not fall monotonically: it falls to k = {first - 1} and rises (d = {FEATURES})"),
        (
            change("causal", "sinusoidal") > 0.1,
            f"sinusoidal positions do not extrapolate: {change('causal', 'sinusoidal'):+.2f} nats at {longest} tokens",
        ),
        (
            change("causal", "alibi") < 0.05,
            f"ALiBi does: {change('causal', 'alibi'):+.2f} (rotary: {change('causal', 'rotary'):+.2f}; "
            "learned positions have no vector there)",
        ),
        (
            shuffled["no mask"] < 1e-4 < 1e-2 < shuffled["causal"],
            "without positions, permuting the other characters changes the logits by "
            f"{shuffled['no mask']:.0e}; under the causal mask, which reveals order, by {shuffled['causal']:.2f}",
        ),
        (
            cost("no mask") > cost("causal"),
            f"doing without positions costs {cost('no mask'):.2f} nats without a mask and {cost('causal'):.2f} with it",
        ),
    )


def _losses(rows):
    """`{(mask, positions): {length: mean loss}}`."""
    groups = {}
    for row in rows:
        if row["what"] == "extrapolation":
            groups.setdefault((row["mask"], row["positions"]), []).append(row)
    return {
        which: {n: np.mean(v) for n, v in table(group, "length", "loss").items()} for which, group in groups.items()
    }


def draw(rows: list[dict]) -> Figure:
    """Similarity against distance, and loss against length with and without the causal mask, means over seeds.

    Left, the similarity determines the distance only if the curve always falls. In the other panels the leftmost
    points are at the trained length: if a curve rises from there, its positions do not extrapolate.
    """
    loss = _losses(rows)
    similarity = [row["similarity"] for row in rows if row["what"] == "similarity"]
    panels = {
        f"sinusoidal similarity, d = {FEATURES}": {
            "series": {"sinusoidal": (range(len(similarity)), similarity)},
            "x": "distance k (positions)",
            "y": "PE(p)·PE(p + k) / (d/2)",
            "markers": False,
        }
    }
    for mask, what in (("causal", "next character, causal mask"), ("no mask", "masked characters, no mask")):
        panels[what] = {
            "series": {p: (list(v), list(v.values())) for (m, p), v in loss.items() if m == mask},
            "x": f"length (tokens; trained on {CONTEXT})",
            "y": "loss on the last 16 (nats per character)",
            "log": "x",
        }
    finding = "Similarity oscillates as it falls; models trained on 64 tokens may fail at 256"
    return plots.panels(panels, judge(rows).title(finding), columns=3)
