# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 Positions
#
# Attention by itself ignores order. In this lesson you will see what a causal mask reveals about order, build the
# sinusoidal encoding and check its four promised properties, find the rotation in it, compare it with learned, rotary
# and ALiBi positions, and train four small models to see which of them work beyond their training length.

# %%
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import attnlab
from attnlab import plots
from attnlab.config import default
from attnlab.data import corpora, tokenizers
from attnlab.data.batches import EvalBatches, TrainBatches
from attnlab.masks import Causal
from attnlab.nn import GPT, Block, LearnedPositions, Mlp, MultiHeadAttention, rotary, sinusoidal
from attnlab.score_mods import ALiBi, alibi_slopes
from attnlab.training import optimizer as optimizers
from attnlab.training import state as states

# %% [markdown]
# ## Without positions a sentence is a bag of words
#
# Let $P$ permute the rows of $X$. The scores of $PX$ are those of $X$, permuted, so attention of $PX$ is $P$ times
# attention of $X$: each word gets the same new vector in "Alicia come manzanas" as in "manzanas come Alicia". The
# vectors are permuted with their words, and none of them tells who eats whom.

# %%
words = ["Alicia", "come", "manzanas"]
reverse = jnp.array([2, 1, 0])
x = jax.random.normal(jax.random.key(0), (3, 8))
attend = MultiHeadAttention(num_heads=2)
params = attend.init(jax.random.key(1), x[None])

there, back = attend.apply(params, x[None])[0], attend.apply(params, x[None, reverse])[0]
np.testing.assert_allclose(back, there[reverse], atol=1e-6)
for name, i, j in zip(words, range(3), reverse):
    print(f"{name:9}{np.asarray(there[i, :4]).round(3)} first,  {np.asarray(back[j, :4]).round(3)} reversed")

# %% [markdown]
# ## A causal mask reveals order, from the second layer on
#
# Under the causal mask the last token attends to all tokens before it. In *one* layer the result is a weighted mean
# over a set: permute the earlier tokens, and the last output does not change. But the earlier outputs do change: the
# second token attends to one neighbour, the third to two. A second layer reads those outputs, so its last output
# depends on the order. This is how models without positional encodings learn positions (Haviv et al. 2022).
#
# Here are all 120 orders of five tokens before a sixth one, through stacks of 1 to 4 blocks.


# %%
def last_output(tokens, layers, mask):
    """The last token's vector after `layers` untrained blocks without positions."""
    for layer in range(layers):
        block = Block(MultiHeadAttention(num_heads=4, mask=mask), Mlp())
        tokens, _ = block.init_with_output(jax.random.key(layer), tokens)
    return tokens[:, -1]


orders = jnp.array([(*order, 5) for order in itertools.permutations(range(5))])
sentences = jax.random.normal(jax.random.key(2), (6, 32))[orders]  # [120, 6, 32]
depths = [1, 2, 3, 4]
changes = {}
for name, mask in {"no mask": None, "causal mask": Causal()}.items():
    outputs = [last_output(sentences, depth, mask) for depth in depths]
    changes[name] = [jnp.linalg.norm(out - out[0], axis=-1).max() / jnp.linalg.norm(out[0]) for out in outputs]
    print(f"{name:12}", *(f"{change:.1e}" for change in changes[name]))

np.testing.assert_allclose(changes["no mask"], 0, atol=1e-5)
np.testing.assert_allclose(changes["causal mask"][0], 0, atol=1e-5)
plots.lines(
    {name: ([str(depth) for depth in depths], change) for name, change in changes.items()},
    "Permuting the earlier tokens does not change the output of one causal layer, but does change that of two",
    x="depth (blocks)",
    y="largest relative change of the last output",
)

# %% [markdown]
# ## Sinusoidal positions
#
# Vaswani et al. (2017, section 3.5) add a fixed vector to each token. It consists of pairs that rotate at different
# frequencies:
#
# $$PE(pos, 2i) = \sin(pos \cdot \omega_i), \quad PE(pos, 2i + 1) = \cos(pos \cdot \omega_i), \quad
# \omega_i = 10000^{-2i/d}$$

# %%
d, length = 128, 200
pe = sinusoidal(jnp.arange(length), d)
omega = 10_000.0 ** (-np.arange(0, d, 2) / d)
by_hand = np.zeros((length, d))
for pos in range(length):
    for i in range(d // 2):
        by_hand[pos, 2 * i] = np.sin(pos * omega[i])
        by_hand[pos, 2 * i + 1] = np.cos(pos * omega[i])
np.testing.assert_allclose(pe, by_hand, atol=3e-5)

plots.weights(
    pe[:100],
    "Each pair of features rotates more slowly than the one before it",
    x="feature",
    y="position (tokens)",
    label="value",
)

# %% [markdown]
# Here are four columns of that picture. It works like a counter: the last digit changes at every step, the next one
# more slowly. The slowest pair here has a period of 54,000 tokens.

# %%
plots.panels(
    {
        f"feature {2 * i}: a period of {2 * np.pi / omega[i]:.0f} tokens": {
            "series": {"": (np.arange(120), pe[:120, 2 * i])},
            "x": "position (tokens)",
            "y": "value of the feature",
            "markers": False,
        }
        for i in (0, 8, 16, 20)
    },
    "Later features have longer periods",
)

# %% [markdown]
# ## Four promised properties, checked one by one
#
# 1. *Every position has its own vector.* Checked for all pairs below 2,000. This requires many pairs of features:
#    with one alone, position 44 is nearly position 0, because $44 \approx 7 \cdot 2\pi$.

# %%
many = sinusoidal(jnp.arange(2000), d)
squares = (many**2).sum(axis=1)
np.testing.assert_allclose(squares, d / 2, rtol=1e-5)  # sin² + cos² = 1 in each pair
nearest = jnp.sqrt(d - 2 * jnp.sort(many @ many.T, axis=1)[:, -2])  # ‖a − b‖² = ‖a‖² + ‖b‖² − 2 a·b
print(f"d = 128: the nearest two positions are {nearest.min():.2f} apart")
print(f"d = 2:   positions 0 and 44 are {jnp.linalg.norm(jnp.subtract(*sinusoidal(jnp.array([0, 44]), 2))):.3f} apart")

# %% [markdown]
# 2. *A distance means the same everywhere and in every sentence.* The encoding does not depend on the sentence length,
#    and $\|PE(pos + k) - PE(pos)\|$ does not depend on $pos$. The wrong way, for comparison: with positions as a
#    fraction of the sentence, one step is 20 times as large in a sentence 20 times as short.

# %%
for k in (1, 10, 50):
    distances = jnp.linalg.norm(pe[k:] - pe[:-k], axis=1)
    np.testing.assert_allclose(distances, distances[0], rtol=1e-3)
    print(f"k = {k:<3} distance {distances.min():.3f} to {distances.max():.3f} over all places")
np.testing.assert_array_equal(sinusoidal(jnp.arange(10), d), pe[:10])
print("wrong: one step in a sentence of 10 is", 1 / 10, "and in one of 200 is", 1 / 200)

# %% [markdown]
# 3. *It continues beyond the training length.* It is defined for any position and stays between −1 and 1, while a plain
#    count 0, 1, 2, … grows. Whether a model can use positions that it was not trained on is another question, which the
#    last section tests.
# 4. *It is deterministic, and nothing is learned.* A GPT has the same number of parameters with it and without.

# %%
print("largest feature at position one million:", float(abs(sinusoidal(1_000_000, d)).max()))
tokens = jnp.zeros((1, 4), jnp.int32)
for positions in ("none", "sinusoidal", "rotary", "alibi", "learned"):
    model = GPT(vocab_size=100, num_layers=2, num_heads=4, width=64, context=32, positions=positions)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    print(f"{positions:11}{sum(leaf.size for leaf in jax.tree.leaves(shapes)):,} parameters")

# %% [markdown]
# ## A shift is a rotation
#
# $\sin(\omega(p + k))$ and $\cos(\omega(p + k))$ follow from $\sin \omega p$ and $\cos \omega p$ by rotating the pair
# by the angle $\omega k$. So $PE(p + k) = R_k \, PE(p)$ with the same orthogonal matrix of 2 × 2 blocks for all $p$.


# %%
def rotation(k):
    """R_k, `[d, d]`."""
    sin, cos = np.sin(omega * k), np.cos(omega * k)
    blocks = np.moveaxis(np.array([[cos, sin], [-sin, cos]]), -1, 0)
    return jax.scipy.linalg.block_diag(*blocks)


for k in (1, 7, 50):
    np.testing.assert_allclose(pe[k:], pe[:-k] @ rotation(k).T, atol=5e-5)
np.testing.assert_allclose(rotation(7) @ rotation(7).T, np.eye(d), atol=1e-5)
np.testing.assert_allclose(rotation(3) @ rotation(4), rotation(7), atol=1e-5)

# %% [markdown]
# So a head can learn to attend "k positions back": a linear map of the query is enough. Here the queries are
# $R_{-k} PE(p)$, the keys are $PE(p)$, and nothing is trained. (The first k queries have no such key and attend
# elsewhere.)

# %%
back = [0, 1, 4, 12]
queries = jnp.stack([pe[:24] @ rotation(-k).T for k in back], axis=1)  # [length, heads, d]
shifted = attnlab.attention_weights(queries, pe[:24, None], mask=Causal(), scale=1.0)
for head, k in enumerate(back):
    np.testing.assert_array_equal(shifted[head].argmax(axis=1)[k:], np.arange(24 - k))
plots.heads(
    shifted,
    "With queries rotated by −k steps, a head attends k positions back",
    mask=Causal(),
    names=[f"k = {k}" for k in back],
)

# %% [markdown]
# ## Similarity is not monotone in distance
#
# $PE(p) \cdot PE(p + k) = \sum_i \cos(\omega_i k)$ for all $p$. It is symmetric in $k$, so the product alone cannot
# distinguish before from after. Document 002 says that it falls smoothly with the distance. It does not: for d = 128 it
# falls until k = 11, and k = 12 is more similar again.

# %%
distance = np.arange(1001)
similarity = {width: sinusoidal(distance, width) @ sinusoidal(0, width) / (width / 2) for width in (64, 128, 512)}
np.testing.assert_allclose(similarity[128], np.cos(np.outer(distance, omega)).mean(axis=1), atol=1e-4)
rises_from = {width: int(np.argmax(np.diff(s) > 0)) for width, s in similarity.items()}
print("the similarity first rises at k =", rises_from)
print("d = 128, at k = 10, 100, 1000:", *(f"{similarity[128][k]:.2f}" for k in (10, 100, 1000)))
assert rises_from[128] == 11

axes = {"x": "distance k (tokens)", "y": "PE(p)·PE(p + k), 1 at k = 0"}
close = slice(9, 16)
plots.panels(
    {
        "an oscillating decrease": {
            "series": {f"d = {width}": (distance[:31], s[:31]) for width, s in similarity.items()},
            **axes,
        },
        "d = 128, enlarged: rising again from k = 11": {
            "series": {"d = 128": (distance[close], similarity[128][close])},
            **axes,
        },
    },
    "The nearer of two positions is not always the more similar one",
)

# %% [markdown]
# ## Why a sum, and what it costs
#
# The input of the first layer is $x + PE$. A score of raw vectors then has four terms: word–word, word–position,
# position–word and position–position. Concatenated vectors only have the first and the last. So the sum does not
# *avoid* mixing meaning and position, as document 002 claims; it mixes them, and the layers have to separate them. What
# it saves is width: the projection of a sum is the projection of a concatenation whose two halves share a matrix.

# %%
word = jax.random.normal(jax.random.key(3), (length, d))
a, b = 3, 40
summed = (word + pe)[a] @ (word + pe)[b]
terms = word[a] @ word[b], word[a] @ pe[b], pe[a] @ word[b], pe[a] @ pe[b]
np.testing.assert_allclose(summed, sum(terms), rtol=1e-4)
joined = jnp.concatenate([word, pe], axis=1)
np.testing.assert_allclose(joined[a] @ joined[b], terms[0] + terms[3], rtol=1e-4)
print("word·word, word·position, position·word, position·position:", *(f"{term:.1f}" for term in terms))

kernel = jax.random.normal(jax.random.key(4), (d, d))
np.testing.assert_allclose((word + pe) @ kernel, joined @ jnp.concatenate([kernel, kernel]), rtol=1e-3, atol=1e-3)
for name, row in {"summed": word + pe, "concatenated": joined}.items():
    block = Block(MultiHeadAttention(num_heads=4), Mlp())
    shapes = jax.eval_shape(block.init, jax.random.key(0), row[None])
    print(f"a block on {name} vectors: {sum(leaf.size for leaf in jax.tree.leaves(shapes)):,} parameters")

# %% [markdown]
# In a sum, scale matters. Each feature of $PE$ has a mean square of ½. An embedding initialised with a standard
# deviation of 0.02, like GPT-2's, is negligible next to it. Vaswani et al. (section 3.4) multiply embeddings by $\sqrt
# d$ before the sum, and so does attnlab's GPT.

# %%
scales = {"wrong: as initialised in GPT-2": 0.02, "times √d": 0.02 * d**0.5, "a standard deviation of 1": 1.0}
for name, deviation in scales.items():
    print(f"{deviation**2 / (deviation**2 + 0.5):6.2%} of the first layer's input variance is the word ({name})")

# %% [markdown]
# ## Learned positions, and their limit
#
# GPT-2 learns a table with one row per position (Radford et al. 2019). Beyond the last row it is undefined, and attnlab
# raises an error.

# %%
table = LearnedPositions(context=8, features=4)
params = table.init(jax.random.key(0), jnp.arange(8))
np.testing.assert_array_equal(table.apply(params, jnp.arange(8)), params["params"]["embedding"])
try:
    table.apply(params, jnp.arange(9))
except ValueError as error:
    print(error)

# %% [markdown]
# ## Rotary positions rotate queries and keys
#
# If a shift is a rotation, we can rotate the queries and keys themselves (Su et al. 2021). Feature pairs are read as
# complex numbers, and position p multiplies them by $e^{i p \omega}$. In $q \cdot k$ only the difference of the angles
# remains: a score depends on the distance between two tokens, but not on their positions.

# %%
q, k = jax.random.normal(jax.random.key(5), (2, 1, 64))
places = jnp.arange(100)
rotated = rotary(jnp.broadcast_to(q, (100, 1, 64)), places)[:, 0]
complex_q = (q[0, :32] + 1j * q[0, 32:]) * np.exp(1j * np.outer(places, 10_000.0 ** (-np.arange(32) / 32)))
np.testing.assert_allclose(rotated, np.concatenate([complex_q.real, complex_q.imag], axis=1), atol=1e-4)


def rotary_score(apart, at):
    """Score of q at position `at` and k, `apart` positions before it."""
    return rotary(q[None], jnp.array([at]))[0, 0] @ rotary(k[None], jnp.array([at - apart]))[0, 0] / 8


def added_score(apart, at):
    """The same two vectors with sinusoidal positions added to them."""
    return (q[0] + sinusoidal(at, 64)) @ (k[0] + sinusoidal(at - apart, 64)) / 8


apart = jnp.arange(64)
scores = {
    score: {f"query at {at}": (apart, jax.vmap(score, (0, None))(apart, at)) for at in (64, 80, 500)}
    for score in (added_score, rotary_score)
}
for _, score in scores[rotary_score].values():
    np.testing.assert_allclose(score, scores[rotary_score]["query at 64"][1], atol=1e-3)
axes = {"x": "distance of the key (tokens back)", "y": "score q·k/√d", "markers": False}
plots.panels(
    {
        "sinusoidal, added: depends on the position": {"series": scores[added_score], **axes},
        "rotary: the three curves coincide": {"series": scores[rotary_score], **axes},
    },
    "The same two words at three positions: a rotary score depends only on the distance",
)

# %% [markdown]
# ## ALiBi: a slope for each head
#
# Press et al. (2022) leave the vectors unchanged and reduce the score of a key by a slope times its distance. In
# attnlab that is a score mod. If all contents are equal, what remains is the reach of each head.

# %%
slopes = alibi_slopes(8)
equal = jnp.ones((32, 8, 4))
reach = attnlab.attention_weights(equal, equal, mask=Causal(), score_mod=ALiBi(slopes))  # [heads, queries, keys]
i, j = np.indices((32, 32))
lowered = np.where(j <= i, -np.asarray(slopes)[:, None, None] * (i - j), -np.inf)
np.testing.assert_allclose(reach, jax.nn.softmax(lowered, axis=-1), atol=1e-6)
plots.lines(
    {f"slope 1/{1 / slopes[head]:.0f}": (31 - np.arange(32), reach[head, -1]) for head in (0, 1, 2, 3, 5, 7)},
    "With equal contents under ALiBi, weights decay with distance at a different rate in each head",
    x="distance of the key (tokens back)",
    y="weight from the last query",
    log="y",
    markers=False,
)

# %% [markdown]
# ## Which models work beyond their training length?
#
# That an encoding is defined beyond the training length does not mean that a model can use it there. That is a
# hypothesis, so we test it: four small GPTs that differ only in their positions are trained on windows of 32 characters
# of Python's documentation, and evaluated on held-out windows of 128. This is one seed, two layers and seconds of
# training: repeat the experiment at your own scale before you draw conclusions.

# %%
corpus = corpora.read_text("python_docs")
tokenizer = tokenizers.make("char", corpus.text)
context, width, steps = 32, 48, 450
batches = TrainBatches(tokenizer.encode(corpus.train), context=context, batch_size=24, seed=0)
windows = EvalBatches(tokenizer.encode(corpus.validation), context=4 * context, batch_size=32, windows=192)
config = default().optimizer
config.warmup_steps = 25
optimizer = optimizers.make(config, steps)

losses = {}
for positions in ("sinusoidal", "rotary", "alibi", "none"):
    model = GPT(
        tokenizer.vocab_size, num_layers=2, num_heads=4, width=width, context=context, positions=positions, qk_norm=True
    )
    step = jax.jit(functools.partial(states.train_step, model, optimizer, 0, 1), donate_argnums=0)
    state = states.create(model, optimizer, seed=0)
    for at in range(steps):
        state, _ = step(state, batches[at])
    score = jax.jit(functools.partial(states.token_losses, model))
    losses[positions] = np.concatenate([score(state.params, batch) for batch in windows]).mean(axis=0)  # by position

print("loss (nats per character) over windows of    1×     2×     4× the trained length")
for positions, loss in losses.items():
    print(f"{positions:42}", *(f"{loss[: n * context].mean():.3f} " for n in (1, 2, 4)))

# %%
bins = np.arange(4, 4 * context, 8) / context
rise = {name: loss[-context:].mean() - loss[:context].mean() for name, loss in losses.items()}
plots.lines(
    {name: (bins, loss.reshape(-1, 8).mean(axis=1)) for name, loss in losses.items()},
    "Loss at three to four times the trained length minus that within it: "
    + ", ".join(f"{name} {nats:+.2f}" for name, nats in rise.items())
    + " nats",
    x="position in the window (1 = the trained length)",
    y="loss (nats per character)",
)

# %% [markdown]
# Up to 1, every model is within its training length. Beyond it, the sinusoidal model encounters vectors that it has not
# been trained on, and gets worse at once. Rotary, the best within the training length, holds for a while and then gets
# worse too: its angles between distant tokens are new. ALiBi does not degrade, as distant tokens already had little
# weight. The model without positions has less to lose, and loses little. So the third property holds for the formula,
# but not for the model trained with it (Press et al. 2022 found the same at full scale). With one seed, small
# differences between curves mean little.
