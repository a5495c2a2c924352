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
# # 1 Attention by hand
#
# This lesson computes attention between six word vectors. Dot products become weights, and weights average values. A
# long vector can hijack the result, and you will see what helps against that. Then come the three trained matrices for
# queries, keys and values, the causal mask, and dropout. Every step is computed twice: from the formula, and with the
# attnlab function that you would use in practice.
#
# The words are those of document 001; the raw attention is that of document 004.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import attnlab
from attnlab import plots
from attnlab.masks import Causal
from attnlab.nn import Head, MultiHeadAttention

np.set_printoptions(precision=4, suppress=True)

words = ["Your", "journey", "starts", "with", "one", "step"]
x = jnp.array(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)


# %% [markdown]
# ## Scores are dot products
#
# $s_{ij} = v_i \cdot v_j = \|v_i\| \|v_j\| \cos\theta$ is large when two vectors point in the same direction, but also
# when they are simply long.

# %%
scores = x @ x.T
loops = jnp.array([[sum(a * b for a, b in zip(row, column)) for column in x] for row in x])
np.testing.assert_allclose(scores, loops, atol=1e-6)

lengths = jnp.linalg.norm(x, axis=1)
cosines = scores / jnp.outer(lengths, lengths)
np.testing.assert_allclose(scores, jnp.outer(lengths, lengths) * cosines, atol=1e-6)
print({word: f"{length:.2f}" for word, length in zip(words, lengths)})
print(np.asarray(scores))

# %%
plots.heads(
    [cosines, jnp.outer(lengths, lengths), scores],
    '"with" points in almost the same direction as "journey", but it is short: its scores are low',
    tokens=words,
    names=["cos θ", "‖v_i‖ ‖v_j‖", "their product: the score"],
    label="value",
)

# %% [markdown]
# ## Softmax turns scores into weights
#
# Document 001 first divides each score by the sum of its row. That only works for positive scores. Shift the six
# vectors so that their mean is 0, and every row of scores sums to 0:

# %%
centred = (x - x.mean(axis=0)) @ (x - x.mean(axis=0)).T
print("wrong:", (centred / centred.sum(axis=-1, keepdims=True))[1])
print("right:", jax.nn.softmax(centred, axis=-1)[1])

# %% [markdown]
# The exponential makes every term positive: $w_{ij} = e^{s_{ij}} / \sum_k e^{s_{ik}}$. Computed literally it overflows,
# because $e^{89}$ exceeds the largest float32. Subtracting the largest score first gives the same result without
# overflow.


# %%
def naive_softmax(scores):
    return jnp.exp(scores) / jnp.exp(scores).sum(axis=-1, keepdims=True)


weights = jax.nn.softmax(scores, axis=-1)
np.testing.assert_allclose(naive_softmax(scores), weights, rtol=1e-5)
print("wrong, scores times 100:", naive_softmax(100 * scores)[1])
print("right, scores times 100:", jax.nn.softmax(100 * scores, axis=-1)[1])

# %% [markdown]
# Document 004 prints the fraction without the exponential in the denominator, $e^{s_{ij}} / \sum_k s_{ik}$. Its rows
# sum to about 2.9 instead of 1.

# %%
printed = jnp.exp(scores) / scores.sum(axis=-1, keepdims=True)
print("wrong:", printed.sum(axis=-1))
print("right:", weights.sum(axis=-1))
plots.heads(
    [printed, weights],
    "Without the exponential in the denominator, weights are about three times too large",
    tokens=words,
    names=["wrong: divided by Σ s", "right: divided by Σ exp s"],
)

# %% [markdown]
# ## Weights average values
#
# Each word's new vector is a weighted mean of all vectors: $y_i = \sum_j w_{ij} v_j$. `attnlab.attention` does all
# three steps. It expects a head axis after the length; `scale=1.0` leaves the scores unscaled.

# %%
context = weights @ x
one_head = x[:, None, :]  # [length, heads, features]
np.testing.assert_allclose(context, attnlab.attention(one_head, one_head, one_head, scale=1.0)[:, 0], atol=1e-6)
np.testing.assert_allclose(weights, attnlab.attention_weights(one_head, one_head, scale=1.0)[0], atol=1e-6)
print(np.asarray(context))

# %% [markdown]
# ## A long vector hijacks the others
#
# "journey" is the longest vector, and four of the six words, including itself, give it their largest weight. "with" is
# more similar in direction to itself than to "journey", and still attends more to "journey" than to itself.

# %%
winners = [words[j] for j in weights.argmax(axis=-1)]
print({word: winners.count(word) for word in words})
plots.weights(weights, '"journey", the longest vector, gets the largest weight in four rows of six', queries=words)

# %% [markdown]
# Document 004 points out this danger, $\|v_1\| \ll \|v_2\|$, and suggests trainable matrices as the remedy. But a
# linear map does not normalise: for any $W$, trained or not, $(16\,x) W = 16\,(x W)$, so the score is 16 times as
# large. Training only determines its sign: the long word gets nearly all of the weight or nearly none.
#
# QK-norm does normalise: `MultiHeadAttention(qk_norm=True)` applies layer norm to queries and keys after the projection
# (Dehghani et al. 2023), but not to values. A layer norm of the input, as before every attention layer of GPT-2
# (Radford et al. 2019), normalises all three.
#
# We make "journey" 1 to 16 times as long and measure two shares for the five other words: of their attention weight,
# and of their new vector, $w_{ij} \|v_j\| / \sum_k w_{ik} \|v_k\|$. The matrices are drawn at random 200 times. For
# plain Q, K, V the figure shows the 90th and the 10th percentile; for the other two the mean.

# %%
factors = (1, 2, 4, 8, 16)
others = jnp.array([0, 2, 3, 4, 5])


def shares(weights, values):
    """The mean share of "journey" in the other words' weights, and in their new vectors."""
    parts = weights * jnp.linalg.norm(values, axis=-1)
    return jnp.stack([weights[others, 1].mean(), (parts[:, 1] / parts.sum(axis=-1))[others].mean()])


def raw(x, seed):
    return shares(attnlab.attention_weights(x[:, None], x[:, None], scale=1.0)[0], x)


def projected(x, seed, qk_norm=False):
    module = MultiHeadAttention(num_heads=1, head_dim=8, use_bias=False, qk_norm=qk_norm)
    params = module.init(seed, x[None])
    _, state = module.apply(params, x[None], mutable=["intermediates"])
    values = x @ params["params"]["value"]["kernel"][:, 0]
    return shares(state["intermediates"]["attention_weights"][0][0, 0], values)


remedies = {
    "raw": raw,
    "Q, K, V": projected,
    "QK-norm": lambda x, seed: projected(x, seed, qk_norm=True),
    "layer norm first": lambda x, seed: projected(jax.nn.standardize(x, axis=-1), seed),
}
longer = jnp.stack([x.at[1].multiply(factor) for factor in factors])
seeds = jax.random.split(jax.random.key(0), 200)
measured = {  # [factor, draw, attention or new vector]
    name: np.asarray(jax.jit(jax.vmap(jax.vmap(remedy, (None, 0)), (0, None)))(longer, seeds))
    for name, remedy in remedies.items()
}
for name in ("QK-norm", "layer norm first"):  # the weights no longer depend on the length
    np.testing.assert_allclose(measured[name][-1, :, 0], measured[name][0, :, 0], rtol=1e-3)

# %%
high, low = (np.percentile(measured["Q, K, V"], p, axis=1) for p in (90, 10))
curves = {
    "raw": measured["raw"].mean(axis=1),
    "Q, K, V: high": high,
    "Q, K, V: low": low,
    "QK-norm": measured["QK-norm"].mean(axis=1),
    "layer norm first": measured["layer norm first"].mean(axis=1),
}
plots.panels(
    {
        name: {
            "series": {label: (factors, curve[:, which]) for label, curve in curves.items()},
            "x": 'length of "journey" (times its own)',
            "y": 'share of "journey" (0 to 1)',
            "log": "x",
        }
        for which, name in enumerate(["of the other words' attention", "of the other words' new vectors"])
    },
    "Projections make the hijack all or nothing; QK-norm stops it in the weights, but not in the values",
)

# %% [markdown]
# ## Trained matrices: query, key, value
#
# The query $q = x W_q$ says what a word is looking for, the key $k = x W_k$ what it offers to be found by, and the
# value $v = x W_v$ what it contributes. Scores are divided by the square root of the width of q and k, here 2 (lesson 2
# explains why). Document 001 draws the matrices with torch, which uses the lowest 24 bits of each output of a Mersenne
# Twister, so we can reproduce its numbers.


# %%
def torch_rand(seed, *shape):
    """The result of torch.rand after torch.manual_seed(seed)."""
    words = np.random.RandomState(seed).randint(2**32, size=shape, dtype=np.uint32)
    return (words & 0xFFFFFF).astype(np.float32) / 2**24


W_q, W_k, W_v = torch_rand(123, 3, 3, 2)  # three matrices [3 features, width 2]
q, k, v = x @ W_q, x @ W_k, x @ W_v
one_query = jax.nn.softmax(q[1] @ k.T / np.sqrt(2)) @ v
print('query of "journey": ', q[1])
print("its weights:        ", jax.nn.softmax(q[1] @ k.T / np.sqrt(2)))
print("its new vector:     ", one_query)
np.testing.assert_allclose(one_query, [0.3061, 0.8210], atol=5e-5)  # as printed in document 001

# %% [markdown]
# `Head` is the same computation as a Flax module. Its parameters are the three matrices, `[features, width]`.

# %%
head = Head(head_dim=2, mask=None)
params = {"params": {"query": {"kernel": W_q}, "key": {"kernel": W_k}, "value": {"kernel": W_v}}}
by_hand = jax.nn.softmax(q @ k.T / np.sqrt(2), axis=-1) @ v
np.testing.assert_allclose(head.apply(params, x[None])[0], by_hand, atol=1e-6)
print(np.asarray(by_hand))

# %% [markdown]
# ### Exercise 3.1: weights from a torch linear layer
#
# `torch.nn.Linear(3, 2)` stores its matrix as `[out, in]` and computes $x W^\top$; Flax stores `[in, out]` and computes
# $x W$. Moving weights from one to the other requires a transpose.

# %%
bound = 1 / np.sqrt(3)
linear = torch_rand(123, 3, 2, 3) * 2 * bound - bound  # three torch.nn.Linear(3, 2, bias=False).weight
names = ("query", "key", "value")
moved = {"params": {name: {"kernel": weight.T} for name, weight in zip(names, linear)}}
exercise = head.apply(moved, x[None])[0]
print(np.asarray(exercise))
np.testing.assert_allclose(exercise[0], [-0.5337, -0.1051], atol=5e-5)  # as printed in document 001

# %% [markdown]
# If you forget the transpose, one of two things happens. If the matrix is not square, you get a shape error. If it is
# square, there is no error and every number is wrong.

# %%
square = torch_rand(123, 3, 3, 3) * 2 * bound - bound  # three torch.nn.Linear(3, 3, bias=False).weight
wide = Head(head_dim=3, mask=None)
for name, matrices in (("wrong", square), ("right", square.swapaxes(-1, -2))):
    params = {"params": {which: {"kernel": matrix} for which, matrix in zip(names, matrices)}}
    print(name, wide.apply(params, x[None])[0, 0])

# %% [markdown]
# ### `keys.T` breaks on batches
#
# `.T` reverses all axes: `[batch, length, width]` becomes `[width, length, batch]`. Usually that raises an error, but
# if the three sizes happen to be equal, it gives a wrong answer. `swapaxes(-1, -2)` is right for any number of batch
# axes.

# %%
queries, keys = jnp.stack([q, q]), jnp.stack([k, k])  # [2, 6, 2]
try:
    queries @ keys.T
except TypeError as error:
    print("wrong:", str(error).splitlines()[0])
print("right:", (queries @ keys.swapaxes(-1, -2)).shape)

three = jax.random.normal(jax.random.key(0), (3, 3, 3))  # three sentences of three words, three features wide
print("wrong, and silent:", (three @ three.T)[0, 0])
print("right:            ", (three @ three.swapaxes(-1, -2))[0, 0])

# %% [markdown]
# ## The causal mask hides the future
#
# A model that generates word by word must not look ahead. The causal mask sets the scores above the diagonal to
# $-\infty$, and softmax turns them into weights of exactly 0. A token may attend to itself. Lesson 2 has more masks.

# %%
q, k, v = (x @ weight.T for weight in linear)
visible = jnp.tril(jnp.ones((6, 6), bool))
by_hand = jax.nn.softmax(jnp.where(visible, q @ k.T / np.sqrt(2), -jnp.inf), axis=-1)
causal = attnlab.attention_weights(q[:, None], k[:, None], mask=Causal())[0]
np.testing.assert_allclose(causal, by_hand, atol=1e-6)
np.testing.assert_allclose(Head(head_dim=2).apply(moved, x[None])[0], by_hand @ v, atol=1e-6)  # causal by default
plots.weights(causal, "Under the causal mask no word attends to a later one", queries=words, mask=Causal())

# %% [markdown]
# ## Dropout on the weights
#
# During training each weight is dropped with probability $p$, and the others are scaled by $1 / (1 - p)$, so that the
# mean over many draws is the original weight (Srivastava et al. 2014). With the identity matrix as values, the output
# of `attnlab.attention` is the matrix of weights after dropout.

# %%
rate, draws = 0.5, 20_000


def dropped(key):
    unit = jnp.eye(6)[:, None]
    return attnlab.attention(q[:, None], k[:, None], unit, Causal(), dropout_rate=rate, dropout_key=key)[:, 0]


many = jax.vmap(dropped)(jax.random.split(jax.random.key(0), draws))  # [draws, 6, 6]
kept = many[0] > 0
np.testing.assert_allclose(many[0], jnp.where(kept, causal / (1 - rate), 0), rtol=1e-5)
np.testing.assert_allclose(many.mean(axis=0), causal, atol=5 / np.sqrt(draws))  # 5 standard errors of a weight of 1
print("mean of the rows' sums over all draws:", many.sum(axis=-1).mean(axis=0))

# %%
lost = np.flatnonzero(~kept.any(axis=-1))
print("words whose weights were all dropped in this draw:", [words[i] for i in lost])
plots.heads(
    [causal, many[0]],
    "Dropout at p = 0.5 doubles the weights that it keeps, and may drop all weights of a word",
    tokens=words,
    mask=Causal(),
    names=["before dropout", "after dropout"],
)

# %% [markdown]
# A query with $n$ visible keys loses all of them with probability $p^n$, which under the causal mask is likely for the
# first words. In document 001 it happens to "journey". The remaining weights are not renormalised, so the output is
# zero, and the residual connection around the layer passes the word on.

# %%
visible_keys = np.arange(1, 7)
measured = 1 - (many > 0).any(axis=-1).mean(axis=0)
np.testing.assert_allclose(measured, rate**visible_keys, atol=5 * np.sqrt(0.25 / draws))
plots.lines(
    {"measured, 20,000 draws": (visible_keys, measured), "p to the power n": (visible_keys, rate**visible_keys)},
    "The first word loses all its weights half of the time",
    x="visible keys, n (words)",
    y="probability that all weights are dropped",
    dashed=["p to the power n"],
)
