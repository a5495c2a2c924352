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
# # 2 Scaling and masks
#
# This lesson covers the two operations between the scores and the softmax. Scores are divided by $\sqrt{d_k}$, the
# square root of the head's width, and by nothing else. Masks set scores to $-\infty$: for the future, padding, other
# documents, distant tokens. Each mistake in documents 000, 002 and 003 is shown next to the right way.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import attnlab
from attnlab import plots
from attnlab.masks import BlockSparse, Causal, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.nn import Head, MultiHeadAttention
from attnlab.study.registry import load
from attnlab.study.report import Options

np.set_printoptions(precision=3, suppress=True)

scaling = load("scaling")

# %% [markdown]
# ## Dot products grow with the width
#
# Let the components of $q$ and $k$ be independent, with mean 0 and variance 1. Then $q \cdot k$ is a sum of $d_k$
# products of variance 1: its variance is $d_k$, its magnitude about $\sqrt{d_k}$ (Vaswani et al. 2017, footnote 4).

# %%
draw = np.random.default_rng(0)
for d_k in (1, 16, 256):
    q, k = draw.standard_normal((2, 5000, d_k))
    dots = (q * k).sum(axis=-1)
    print(f"d_k = {d_k:3}: variance of q·k {dots.var():6.1f}, of q·k / √d_k {(dots / np.sqrt(d_k)).var():.2f}")

# %% [markdown]
# ## A softmax of large scores has no gradient
#
# The softmax $p$ of scores $s$ has the Jacobian $\partial p_i / \partial s_j = p_i (\delta_{ij} - p_j)$. Its Frobenius
# norm measures how much gradient passes through, and has the closed form
#
# $$\|J\|^2 = \sum p^2 - 2 \sum p^3 + \Big(\sum p^2\Big)^2.$$
#
# It is small, $\sqrt{(1 - 1/n)/n}$, if all weights are equal; largest, 1/2, if two keys share the weight; and 0 if one
# key has all of it.

# %%
p = jax.nn.softmax(jnp.array([2.0, 1.0, 0.0, -1.0]))
jacobian = jax.jacobian(jax.nn.softmax)(jnp.array([2.0, 1.0, 0.0, -1.0]))
np.testing.assert_allclose(jacobian, jnp.diag(p) - jnp.outer(p, p), atol=1e-6)
np.testing.assert_allclose(scaling.jacobian_norm(np.asarray(p)), jnp.linalg.norm(jacobian), rtol=1e-5)

for name, weights in {"equal": np.full(50, 1 / 50), "two": np.eye(50)[:2].mean(axis=0), "one": np.eye(50)[0]}.items():
    print(f"{name:>6}: ‖J‖ = {scaling.jacobian_norm(weights):.2f}")

# %% [markdown]
# Document 002 draws 50 scores of variance $d_k$, a thousand times for each of twenty widths, and concludes that the
# norm decays with the width. In fact it is not monotone: small scores give nearly equal weights, so the norm rises
# first.


# %%
def mean_norm(scores):
    return scaling.jacobian_norm(np.asarray(jax.nn.softmax(scores, axis=-1))).mean()


widths = np.logspace(0, 4, 20)
simulated = [draw.normal(0, np.sqrt(d_k), size=(1000, 50)) for d_k in widths]
unscaled = [mean_norm(scores) for scores in simulated]
scaled = [mean_norm(scores / np.sqrt(d_k)) for scores, d_k in zip(simulated, widths)]
top = int(np.argmax(unscaled))
plots.lines(
    {
        "scores of variance d_k": (widths, unscaled),
        "the same, divided by √d_k": (widths, scaled),
        "equal weights": (widths, np.full(20, np.sqrt((1 - 1 / 50) / 50))),
    },
    f"Unscaled, the gradient rises to {unscaled[top]:.2f} near d_k = {widths[top]:.0f} before it falls",
    x="d_k, width of queries and keys (features)",
    y="‖Jacobian‖ of the softmax over 50 keys",
    log="xy",
    dashed=["equal weights"],
)

# %% [markdown]
# Drawing scores independently is a shortcut: real scores share their query. The study `scaling` draws queries and keys
# instead, and also tries dividing by $\sqrt{d_{model}}$. The result is the same, with a slightly lower peak.

# %%
rows = scaling.measure(Options(fast=True))
print(scaling.judge(rows))
scaling.draw(rows)

# %% [markdown]
# ## Dividing by the wrong width
#
# Document 000 writes `C**-0.5`, and document 003 divides by $\sqrt{d_{model}}$. For a single head as wide as the model
# these are the same. For six heads they are not: $C = 6\,d_k$, and every score is too small by a factor of $\sqrt 6$.
# `Head` divides by the square root of its own width.

# %%
words = ["el", "perro", "persiguió", "al", "gato", "y", "lo", "atrapó"]
C, d_k = 96, 16
x = jax.random.normal(jax.random.key(2), (len(words), C))
head = Head(head_dim=d_k, mask=None)
params = head.init(jax.random.key(3), x[None])
q, k = (x @ params["params"][name]["kernel"] for name in ("query", "key"))
by_scale = {
    "wrong: not divided": jax.nn.softmax(q @ k.T, axis=-1),
    "right: by √d_k": jax.nn.softmax(q @ k.T / np.sqrt(d_k), axis=-1),
    "wrong: by √C": jax.nn.softmax(q @ k.T / np.sqrt(C), axis=-1),
}
_, state = head.apply(params, x[None], mutable=["intermediates"])
np.testing.assert_allclose(state["intermediates"]["attention_weights"][0][0], by_scale["right: by √d_k"], atol=1e-6)
for name, weights in by_scale.items():
    print(f"{name:>19}: largest weight of a row {weights.max(axis=-1).mean():.2f} on average, of 8 keys")
plots.heads(
    list(by_scale.values()),
    "Without scaling one word gets most of the weight; divided by √C, the weights are too even",
    tokens=words,
    names=list(by_scale),
)

# %% [markdown]
# ## The causal mask
#
# A model that generates word by word must not attend to later words. Document 000 says so, and then gives an example
# that violates it: "el" gives 80 % of its attention to "gato", 15 % to "persiguió" and 5 % to "al". All three come
# after "el". Its second example is valid: "lo" gives 80 % to "gato", 15 % to "persiguió" and 5 % to itself.
#
# We construct scores whose softmax has these two rows and pass them to `attnlab` as a bias. Under `Causal()`, "el" can
# only attend to itself; "lo" is unchanged.

# %%
el, persiguio, al, gato, lo = (words.index(word) for word in ("el", "persiguió", "al", "gato", "lo"))
scores = draw.standard_normal((8, 8)).astype(np.float32)
scores[[el, lo]] = -20
scores[el, [gato, persiguio, al]] = np.log([0.80, 0.15, 0.05])
scores[lo, [gato, persiguio, lo]] = np.log([0.80, 0.15, 0.05])

nothing = jnp.zeros((8, 1, 1))  # queries and keys of zeros: the scores are the bias
ahead = attnlab.attention_weights(nothing, nothing, bias=scores)[0]
causal = attnlab.attention_weights(nothing, nothing, bias=scores, mask=Causal())[0]
visible = np.tril(np.ones((8, 8), bool))
np.testing.assert_allclose(causal, jax.nn.softmax(np.where(visible, scores, -np.inf), axis=-1), atol=1e-6)
for i in (el, lo):
    print(f"{words[i]}, wrong:", np.asarray(ahead[i]), " right:", np.asarray(causal[i]))


def compare(wrong, right, title, names):
    mask = np.stack([np.ones_like(visible), visible])
    plots.heads([wrong, right], title, tokens=words, mask=mask, names=names)


title = '"el" may not attend to "gato", which comes later; "lo" may'
compare(ahead, causal, title, ["wrong: no mask", "right: causal"])

# %% [markdown]
# Document 002 says "previous tokens". The token itself must be included: without it the first row is fully masked.

# %%
previous = MaskFn(lambda b, h, i, j: j < i)
for name, mask in (("wrong", previous), ("right", Causal())):
    weights = attnlab.attention_weights(nothing, nothing, bias=scores, mask=mask)[0]
    print(f"{name}: sum of each row", np.asarray(weights.sum(axis=-1)))

# %% [markdown]
# ## Mask with $-\infty$, before the softmax
#
# $e^{-\infty} = 0$: a masked key gets no weight. A score of 0 would not mask it, because $e^0 = 1$. The vectors below
# have components between 0 and 1, so that every score is positive; masked cells are grey.

# %%
x = jax.random.uniform(jax.random.key(5), (8, 3))
scores = x @ x.T
before = jnp.where(visible, scores, -jnp.inf)
plots.weights(before, "Before the softmax: the scores of later words are −∞", queries=words, label="score")

# %%
after = jax.nn.softmax(before, axis=-1)
np.testing.assert_allclose(
    after, attnlab.attention_weights(x[:, None], x[:, None], mask=Causal(), scale=1.0)[0], atol=1e-6
)
zeros = jax.nn.softmax(jnp.where(visible, scores, 0), axis=-1)
print("weight that leaks into the future, wrong:", np.asarray(zeros.sum(axis=-1, where=~visible)))
print("weight that leaks into the future, right:", np.asarray(after.sum(axis=-1, where=~visible)))
title = "After the softmax: a score of 0 still gets weight, −∞ gets none"
compare(zeros, after, title, ["wrong: 0", "right: −∞"])

# %% [markdown]
# Document 001 also masks after the softmax and divides each row by the remaining sum. In exact arithmetic that is the
# same. In float32 it fails if a masked score is so large that the visible weights underflow to 0: the result is 0/0.


# %%
def mask_then_renormalise(scores):
    weights = jax.nn.softmax(scores, axis=-1) * visible
    return weights / weights.sum(axis=-1, keepdims=True)


np.testing.assert_allclose(mask_then_renormalise(scores), after, atol=1e-6)
large = scores.at[0, 1].set(200)  # a large score for "perro", which is masked for "el"
print("wrong:", mask_then_renormalise(large)[0])
print("right:", jax.nn.softmax(jnp.where(visible, large, -jnp.inf), axis=-1)[0])

# %% [markdown]
# ## Padding
#
# The sentences of a batch are padded to a common length. `Padding(lengths)` masks the padding as keys. Masks combine
# with `&`, `|` and `~`, so a causal mask with padding is `Causal() & Padding(lengths)`.

# %%
sentences = [s.split() for s in ("El banco aprobó el préstamo", "El gato se sentó", "El gato duerme")]
lengths = jnp.array([len(s) for s in sentences])  # 5, 4, 3
B, N, F = 3, 5, 8
padding = Padding(lengths).dense(N, N)[:, 0]  # without the axis for heads
both = (Causal() & Padding(lengths)).dense(N, N)[:, 0]
np.testing.assert_array_equal(padding, jnp.broadcast_to((jnp.arange(N) < lengths[:, None])[:, None], padding.shape))
np.testing.assert_array_equal(both, jnp.tril(jnp.ones((N, N), bool)) & padding)
plots.masks(
    {
        f"{' '.join(s)}\n{name}": m[b]
        for name, m in (("padding", padding), ("causal & padding", both))
        for b, s in enumerate(sentences)
    },
    "Padding masks columns: a different number in each sentence of the batch",
    columns=3,
)

# %% [markdown]
# A fixed mask is a field of the module; a mask that holds arrays is passed in the call. The contents of the padding
# then have no effect on the real words. The outputs at padding positions are meaningless, and the loss ignores them.

# %%
x = jax.random.normal(jax.random.key(0), (B, N, F))
module = MultiHeadAttention(num_heads=2, mask=Causal())
params = module.init(jax.random.key(1), x)
real = jnp.arange(N) < lengths[:, None]
garbage = jnp.where(real[..., None], x, 1000.0)
apply = jax.jit(module.apply)
out, out_with_garbage = (apply(params, inputs, mask=Padding(lengths)) for inputs in (x, garbage))
np.testing.assert_allclose(out[real], out_with_garbage[real], atol=1e-6)

# %% [markdown]
# ### A mask with too many axes
#
# The padding mask of document 003 is `[B, 1, 1, N]`, made for scores with a head axis. But its attention has no head
# axis: the scores are `[B, N, N]`. NumPy and torch align axes from the right and broadcast silently: the batch axis of
# the scores is aligned with the head axis of the mask, so every sentence is combined with the padding of every other.

# %%
q = k = v = x  # [B, N, F]
mask = np.asarray(real)[:, None, None, :]  # [B, 1, 1, N]
scores = np.asarray(q @ k.swapaxes(-1, -2))
masked = np.where(mask, scores, -np.inf)
out = np.asarray(jax.nn.softmax(masked, axis=-1)) @ v
print("wrong:", scores.shape, "scores and a mask", mask.shape, "give", masked.shape, "and an output", out.shape)

# %% [markdown]
# attnlab accepts an array as a mask only if its shape is unambiguous. It rejects the mask of document 003, and also
# `[B, N, N]`, whose first axis could be the batch or the heads:

# %%
q = k = v = x[:, :, None]  # [B, N, heads, F]
for refused in (mask, both):
    try:
        attnlab.attention(q, k, v, mask=jnp.asarray(refused))
    except ValueError as error:
        print(f"{refused.shape}: {error}\n")
right = attnlab.attention(q, k, v, mask=both[:, None])
np.testing.assert_array_equal(right, attnlab.attention(q, k, v, mask=Causal() & Padding(lengths)))
print("right:", right.shape)

# %% [markdown]
# ### Fully masked rows
#
# In a sentence of length 0, all keys are masked for every query. The softmax of a row of $-\infty$ is 0/0. Replacing
# the NaN by zeros afterwards fixes the output but not the gradient. attnlab returns zeros, with zero gradients.

# %%
lengths = jnp.array([5, 4, 0])
visible_keys = jnp.arange(N) < lengths[:, None]


def naive(x):
    scores = jnp.where(visible_keys[:, None], x @ x.swapaxes(-1, -2) / np.sqrt(F), -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ x


def replaced(x):
    return jnp.nan_to_num(naive(x))


def attend(x):
    return attnlab.attention(x[:, :, None], x[:, :, None], x[:, :, None], mask=Padding(lengths))[:, :, 0]


for name, function in (("wrong, naive", naive), ("wrong, replaced", replaced), ("right, attnlab", attend)):
    gradient = jax.jit(jax.grad(lambda x, function=function: function(x).sum()))(x)
    print(f"{name:>14}: output {function(x)[2, 0, :3]}, gradient {gradient[2, 0, :3]}")
np.testing.assert_allclose(attend(x)[:2], naive(x)[:2], atol=1e-6)

# %% [markdown]
# ## A collection of masks
#
# Every mask is a rule, not an array: it takes no memory, and tiled backends skip tiles without a visible pair.
#
# - `SlidingWindow`: only the nearest neighbours, O(r·n·d) (restricted self-attention, Vaswani et al. 2017, section 4).
# - `PrefixLM`: bidirectional attention within a prefix, causal after it (Raffel et al. 2020).
# - `Segments`: several documents packed into one sequence cannot attend to each other.
# - `BlockSparse`: any pattern of blocks (Child et al. 2019).
# - `Padding(2)` means "the first two keys". Adding them to a window gives attention sinks (Xiao et al. 2024):
#   `Causal() & (SlidingWindow(left=3) | Padding(2))`.

# %%
documents = Segments(jnp.repeat(jnp.arange(3), jnp.array([5, 7, 4])))
blocks = BlockSparse(jnp.eye(4, dtype=bool) | (jnp.arange(4) == 0), size=4)
collection = {
    "Causal": Causal(),
    "SlidingWindow(3)": SlidingWindow(left=3),
    "SlidingWindow(2, 2)": SlidingWindow(left=2, right=2),
    "PrefixLM(6)": PrefixLM(6),
    "Padding(12)": Padding(12),
    "Segments": documents,
    "BlockSparse": blocks,
    "~Causal": ~Causal(),
    "Causal & Segments": Causal() & documents,
    "Causal & BlockSparse": Causal() & blocks,
    "PrefixLM & Padding": PrefixLM(6) & Padding(12),
    "window with sinks": Causal() & (SlidingWindow(left=3) | Padding(2)),
}
plots.masks(
    {f"{name}: {100 * mask.dense(16, 16).mean():.0f} %": mask for name, mask in collection.items()},
    "Dark is visible: these masks keep between a fifth and three quarters of the 256 pairs",
)
