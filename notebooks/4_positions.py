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
# What this lesson teaches: attention by itself knows no order. You see what a causal mask gives away, build the
# sinusoidal encoding and check its four promises, find the rotation in it, compare it with learned, rotary and ALiBi
# positions, and train four small models to see which of them can read further than they were trained.

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
# Let $P$ permute the rows of $X$. Every score of $PX$ is a score of $X$ in another place, so attention of $PX$ is
# $P$ times attention of $X$: each word gets the same new vector in "Alicia come manzanas" as in "manzanas come
# Alicia". The vectors change places with their words; who eats whom is in none of them.

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
# ## A causal mask gives order away, from the second layer on
#
# Under the causal mask the last token sees everything before it. In *one* layer that is a weighted mean over a set:
# put the earlier tokens in another order, and the last output stays. But the earlier outputs did change: the second
# token saw one neighbour, the third saw two. A second layer reads those, and so its last output depends on the order.
# This is how models without any positions learn where they are (Haviv et al. 2022).
#
# Here are all 120 orders of five tokens before a sixth one, through stacks of 1 to 4 blocks.


# %%
def last_output(tokens, layers, mask):
    """The last token's vector after so many untrained blocks without positions."""
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
    "Reorder what came before: one causal layer does not notice, two do",
    x="depth (blocks)",
    y="largest change of the last output (of its length)",
)

# %% [markdown]
# ## Sinusoidal positions
#
# Vaswani et al. (2017, section 3.5) add a fixed vector to each token, made of pairs that turn at different speeds:
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
    "Each pair of features turns more slowly than the one before it",
    x="feature",
    y="position (tokens)",
    label="value",
)

# %% [markdown]
# Four columns of that picture. It is like a counter: the last digit changes at every step, the next one more slowly.
# The slowest pair here takes 54,000 tokens to come round.

# %%
plots.panels(
    {
        f"feature {2 * i}: once round in {2 * np.pi / omega[i]:.0f} tokens": {
            "series": {"": (np.arange(120), pe[:120, 2 * i])},
            "x": "position (tokens)",
            "y": "value of the feature",
            "markers": False,
        }
        for i in (0, 8, 16, 20)
    },
    "Later features take longer to come round",
)

# %% [markdown]
# ## Four promises, checked one by one
#
# 1. *Every position has a vector of its own.* Checked for all pairs below 2,000. It takes many pairs of features:
#    with one alone, position 44 is nearly position 0, because $44 \approx 7 \cdot 2\pi$.

# %%
many = sinusoidal(jnp.arange(2000), d)
squares = (many**2).sum(axis=1)
np.testing.assert_allclose(squares, d / 2, rtol=1e-5)  # sin² + cos² = 1 in each pair
nearest = jnp.sqrt(d - 2 * jnp.sort(many @ many.T, axis=1)[:, -2])  # ‖a − b‖² = ‖a‖² + ‖b‖² − 2 a·b
print(f"d = 128: the nearest other position is {nearest.min():.2f} away")
print(f"d = 2:   positions 0 and 44 are {jnp.linalg.norm(jnp.subtract(*sinusoidal(jnp.array([0, 44]), 2))):.3f} apart")

# %% [markdown]
# 2. *A distance means the same everywhere and in every sentence.* The encoding does not know how long the sentence
#    is, and $\|PE(pos + k) - PE(pos)\|$ does not depend on $pos$. Wrong beside right: positions as a fraction of the
#    sentence, where the same step is 20 times as large in a sentence 20 times as short.

# %%
for k in (1, 10, 50):
    distances = jnp.linalg.norm(pe[k:] - pe[:-k], axis=1)
    np.testing.assert_allclose(distances, distances[0], rtol=1e-3)
    print(f"k = {k:<3} distance {distances.min():.3f} to {distances.max():.3f} over all places")
np.testing.assert_array_equal(sinusoidal(jnp.arange(10), d), pe[:10])
print("wrong: one step in a sentence of 10 is", 1 / 10, "and in one of 200 is", 1 / 200)

# %% [markdown]
# 3. *It goes on beyond the training length.* It is defined for any position, and stays between −1 and 1, where a plain
#    count 0, 1, 2, … grows. Whether a model understands positions it never saw is another question: the last section
#    asks it.
# 4. *It is deterministic, and nothing is learned.* A GPT has as many parameters with it as without.

# %%
print("largest feature at position one million:", float(abs(sinusoidal(1_000_000, d)).max()))
tokens = jnp.zeros((1, 4), jnp.int32)
for positions in ("none", "sinusoidal", "rotary", "alibi", "learned"):
    model = GPT(vocab_size=100, num_layers=2, num_heads=4, width=64, context=32, positions=positions)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    print(f"{positions:11}{sum(leaf.size for leaf in jax.tree.leaves(shapes)):,} parameters")

# %% [markdown]
# ## A step is a rotation
#
# $\sin(\omega(p + k))$ and $\cos(\omega(p + k))$ follow from $\sin \omega p$ and $\cos \omega p$ by turning the pair
# by the angle $\omega k$. So $PE(p + k) = R_k \, PE(p)$ with one matrix for all $p$, orthogonal, made of 2 × 2 blocks.


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
# That makes "k places back" a thing that a head can learn: a linear map of the query is enough. Here the queries are
# $R_{-k} PE(p)$, the keys are $PE(p)$, and nothing is trained. (The first k queries have no such key and look
# elsewhere.)

# %%
back = [0, 1, 4, 12]
queries = jnp.stack([pe[:24] @ rotation(-k).T for k in back], axis=1)  # [length, heads, d]
looks = attnlab.attention_weights(queries, pe[:24, None], mask=Causal(), scale=1.0)
for head, k in enumerate(back):
    np.testing.assert_array_equal(looks[head].argmax(axis=1)[k:], np.arange(24 - k))
plots.heads(
    looks,
    "Turn the queries by −k steps, and a head looks k places back",
    names=[f"k = {k}" for k in back],
)

# %% [markdown]
# ## Similar does not simply mean near
#
# $PE(p) \cdot PE(p + k) = \sum_i \cos(\omega_i k)$, whatever $p$ is. It is symmetric in $k$, so the product alone
# cannot tell before from after. Document 002 says that it falls smoothly with the distance. It does not: for d = 128
# it falls up to k = 11, and k = 12 is more similar again.

# %%
distance = np.arange(1001)
similarity = {width: sinusoidal(distance, width) @ sinusoidal(0, width) / (width / 2) for width in (64, 128, 512)}
np.testing.assert_allclose(similarity[128], np.cos(np.outer(distance, omega)).mean(axis=1), atol=1e-4)
rises_from = {width: int(np.argmax(np.diff(s) > 0)) for width, s in similarity.items()}
print("it first rises from k =", rises_from)
print("d = 128, at k = 10, 100, 1000:", *(f"{similarity[128][k]:.2f}" for k in (10, 100, 1000)))
assert rises_from[128] == 11

axes = {"x": "distance k (tokens)", "y": "PE(p)·PE(p + k), 1 at k = 0"}
close = slice(9, 16)
plots.panels(
    {
        "down on the whole, in waves": {
            "series": {f"d = {width}": (distance[:31], s[:31]) for width, s in similarity.items()},
            **axes,
        },
        "d = 128, from close by: up again from k = 11": {
            "series": {"d = 128": (distance[close], similarity[128][close])},
            **axes,
        },
    },
    "A position is not always more similar to the nearer of two others",
)

# %% [markdown]
# ## Why a sum, and what it costs
#
# The input of the first layer is $x + PE$. A score of raw vectors then has four terms: word with word, word with place,
# place with word, place with place. Concatenated vectors have the first and the last alone. So the sum does not
# *avoid* mixing of meaning and place, as document 002 has it; it mixes them, and the layers have to tell them apart.
# What it saves is width: the projection of a sum is the projection of a concatenation whose two halves share a matrix.

# %%
word = jax.random.normal(jax.random.key(3), (length, d))
a, b = 3, 40
summed = (word + pe)[a] @ (word + pe)[b]
terms = word[a] @ word[b], word[a] @ pe[b], pe[a] @ word[b], pe[a] @ pe[b]
np.testing.assert_allclose(summed, sum(terms), rtol=1e-4)
joined = jnp.concatenate([word, pe], axis=1)
np.testing.assert_allclose(joined[a] @ joined[b], terms[0] + terms[3], rtol=1e-4)
print("word·word, word·place, place·word, place·place:", *(f"{term:.1f}" for term in terms))

kernel = jax.random.normal(jax.random.key(4), (d, d))
np.testing.assert_allclose((word + pe) @ kernel, joined @ jnp.concatenate([kernel, kernel]), rtol=1e-3, atol=1e-3)
for name, row in {"summed": word + pe, "concatenated": joined}.items():
    block = Block(MultiHeadAttention(num_heads=4), Mlp())
    shapes = jax.eval_shape(block.init, jax.random.key(0), row[None])
    print(f"a block on {name} vectors: {sum(leaf.size for leaf in jax.tree.leaves(shapes)):,} parameters")

# %% [markdown]
# A sum also has a loudness. Each feature of $PE$ has a mean square of ½. An embedding that starts with deviation 0.02,
# as GPT-2's does, drowns in it. Vaswani et al. (section 3.4) multiply embeddings by $\sqrt d$ before the sum, and so
# does attnlab's GPT.

# %%
for deviation, what in (0.02, "wrong: as it starts in GPT-2"), (0.02 * d**0.5, "times √d"), (1.0, "a deviation of 1"):
    print(f"{deviation**2 / (deviation**2 + 0.5):6.2%} of what the first layer reads is the word ({what})")

# %% [markdown]
# ## Learned positions, and their end
#
# GPT-2 learns a table with a row for each place (Radford et al. 2019). Beyond the last row there is nothing, and
# attnlab says so.

# %%
table = LearnedPositions(context=8, features=4)
params = table.init(jax.random.key(0), jnp.arange(8))
np.testing.assert_array_equal(table.apply(params, jnp.arange(8)), params["params"]["embedding"])
try:
    table.apply(params, jnp.arange(9))
except ValueError as error:
    print(error)

# %% [markdown]
# ## Rotary positions turn queries and keys
#
# If a step is a rotation, let us turn the queries and keys themselves (Su et al. 2021). Feature pairs are complex
# numbers, and position p multiplies them by $e^{i p \omega}$. In $q \cdot k$ only the difference of the angles is left:
# a score depends on how far apart two tokens are, and not on where.

# %%
q, k = jax.random.normal(jax.random.key(5), (2, 1, 64))
places = jnp.arange(100)
turned = rotary(jnp.broadcast_to(q, (100, 1, 64)), places)[:, 0]
complex_q = (q[0, :32] + 1j * q[0, 32:]) * np.exp(1j * np.outer(places, 10_000.0 ** (-np.arange(32) / 32)))
np.testing.assert_allclose(turned, np.concatenate([complex_q.real, complex_q.imag], axis=1), atol=1e-4)


def rotary_score(apart, at):
    """q at place `at`, k so many places before it."""
    return rotary(q[None], jnp.array([at]))[0, 0] @ rotary(k[None], jnp.array([at - apart]))[0, 0] / 8


def added_score(apart, at):
    """The same two vectors with sinusoidal positions added to them."""
    return (q[0] + sinusoidal(at, 64)) @ (k[0] + sinusoidal(at - apart, 64)) / 8


apart = jnp.arange(64)
scores = {
    score: {f"query at {at}": (apart, jax.vmap(score, (0, None))(apart, at)) for at in (64, 80, 500)}
    for score in (added_score, rotary_score)
}
for _, moved in scores[rotary_score].values():
    np.testing.assert_allclose(moved, scores[rotary_score]["query at 64"][1], atol=1e-3)
axes = {"x": "distance of the key (tokens back)", "y": "score q·k/√d", "markers": False}
plots.panels(
    {
        "sinusoidal, added: it depends on the place": {"series": scores[added_score], **axes},
        "rotary: the three curves are one": {"series": scores[rotary_score], **axes},
    },
    "The same two words at three places: a rotary score knows the distance alone",
)

# %% [markdown]
# ## ALiBi: a slope for each head
#
# Press et al. (2022) leave the vectors alone and lower the score of a key by a slope times its distance. In attnlab
# that is a score mod. Where all contents are equal, what is left is how far each head can see.

# %%
slopes = alibi_slopes(8)
equal = jnp.ones((32, 8, 4))
reach = attnlab.attention_weights(equal, equal, mask=Causal(), score_mod=ALiBi(slopes))  # [heads, queries, keys]
i, j = np.indices((32, 32))
lowered = np.where(j <= i, -np.asarray(slopes)[:, None, None] * (i - j), -np.inf)
np.testing.assert_allclose(reach, jax.nn.softmax(lowered, axis=-1), atol=1e-6)
plots.lines(
    {f"slope 1/{1 / slopes[head]:.0f}": (31 - np.arange(32), reach[head, -1]) for head in (0, 1, 2, 3, 5, 7)},
    "Equal contents under ALiBi: every head forgets with the distance, each at its own rate",
    x="distance of the key (tokens back)",
    y="weight that the last query gives it",
    log="y",
    markers=False,
)

# %% [markdown]
# ## Who reads further than it was trained?
#
# That an encoding is defined beyond the training length does not mean that a model can use it there. It is a
# hypothesis, so we test it: four small GPTs that differ in their positions alone, trained on 32 characters of Python's
# documentation at a time, read windows of 128 that they never saw. One seed, two layers, seconds of training: an
# experiment to repeat at your own size, no more.

# %%
corpus = corpora.load("python_docs")
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
    "Loss in the fourth length, less that in the first: "
    + ", ".join(f"{name} {nats:+.2f}" for name, nats in rise.items())
    + " nats",
    x="place in the window (1 = the trained length)",
    y="loss (nats per character)",
)

# %% [markdown]
# Up to 1 every model reads what it was trained for. Beyond it the sinusoidal model meets vectors that it never saw, and
# gets worse at once. Rotary, the best within the trained length, holds for a little and then gets worse as well: its
# angles between far tokens are new. ALiBi goes on as before, for what is far away was already faint. The model without
# positions has less to lose, and loses little. So the third promise is kept by the formula, and not by the model that
# was trained with it (Press et al. 2022 found the same at full size). Small differences between curves are not worth
# much with one seed.
