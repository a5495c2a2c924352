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
# What this lesson teaches: how six word vectors look at one another. Dot products become weights, weights mix
# values, a mask hides the future, and several heads do all of it side by side. Every step is computed twice: by the
# formula, and by the function of attnlab that you would use.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import attnlab
from attnlab.masks import Causal
from attnlab.nn import Head, MultiHeadAttention, StackedHeads

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


def show(weights, title):
    """One heat map: a row for each query, a column for each key."""
    figure, axes = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
    image = axes.imshow(weights, cmap="viridis", vmin=0)
    axes.set_xticks(range(len(words)), words, rotation=45)
    axes.set_yticks(range(len(words)), words)
    axes.set_xlabel("key: who is looked at")
    axes.set_ylabel("query: who looks")
    figure.suptitle(title, fontsize="medium")
    figure.colorbar(image, label="weight")
    plt.show()


# %% [markdown]
# ## Scores are dot products
#
# $s_{ij} = x_i \cdot x_j = \|x_i\| \|x_j\| \cos\theta$: large when two vectors point the same way, and also when they
# are merely long.

# %%
scores = x @ x.T
print(np.asarray(scores).round(4))
loops = jnp.array([[sum(a * b for a, b in zip(row, column)) for column in x] for row in x])
np.testing.assert_allclose(scores, loops, atol=1e-6)

# %% [markdown]
# ## Softmax turns scores into shares
#
# $w_{ij} = e^{s_{ij}} / \sum_k e^{s_{ik}}$. Written like that it overflows: $e^{89}$ is more than a float32 holds.
# Subtracting the largest score first changes nothing and cannot overflow.

# %%
naive = jnp.exp(scores) / jnp.exp(scores).sum(axis=1, keepdims=True)
weights = jax.nn.softmax(scores, axis=1)
np.testing.assert_allclose(naive, weights, rtol=1e-5)
print("naive, scores times 100: ", (jnp.exp(100 * scores) / jnp.exp(100 * scores).sum(axis=1, keepdims=True))[1])
print("stable, scores times 100:", jax.nn.softmax(100 * scores, axis=1)[1])

# %% [markdown]
# Leave out the exponential below the fraction, and the rows no longer sum to 1:

# %%
print("wrong:", (jnp.exp(scores) / scores.sum(axis=1, keepdims=True)).sum(axis=1))
print("right:", weights.sum(axis=1))

# %% [markdown]
# ## Values are mixed
#
# Each word's new vector is the weighted mean of all of them: $y_i = \sum_j w_{ij} x_j$. `attnlab.attention` does the
# three steps at once; `scale=1` because these scores are not scaled, and one head, whose axis stands after the length.

# %%
context = weights @ x
one_head = x[:, None, :]  # [length, heads, features]
np.testing.assert_allclose(context, attnlab.attention(one_head, one_head, one_head, scale=1.0)[:, 0], atol=1e-6)
print(np.asarray(context).round(4))
show(weights, '"journey" and "starts", the longest vectors, are looked at most')

# %% [markdown]
# ## The future is hidden
#
# A model that writes word by word must not look ahead. The causal mask sets the scores above the diagonal to
# $-\infty$, so that softmax gives them exactly 0. A token does see itself.

# %%
causal = attnlab.attention_weights(one_head, one_head, mask=Causal(), scale=1.0)[0]
show(causal, "Under the causal mask no word looks at a later one")
masked_afterwards = weights * jnp.tril(jnp.ones((6, 6)))
renormalised = masked_afterwards / masked_afterwards.sum(axis=1, keepdims=True)
np.testing.assert_allclose(causal, renormalised, atol=1e-6)

# %% [markdown]
# Masking after the softmax and dividing anew agrees here, and fails where a hidden score is so large that nothing
# visible is left: 0/0.

# %%
large = scores.at[0, 1].set(200.0)
afterwards = jax.nn.softmax(large, axis=1) * jnp.tril(jnp.ones((6, 6)))
print("wrong:", (afterwards / afterwards.sum(axis=1, keepdims=True))[0])
print("right:", jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((6, 6), bool)), large, -jnp.inf), axis=1)[0])

# %% [markdown]
# ## A head learns what to ask for
#
# Three trained matrices give each word a query, a key and a value. The scores are divided by the square root of the
# head's width, here 2, not of the input's 3.

# %%
head = Head(head_dim=2)
params = head.init(jax.random.key(123), x[None])
q, k, v = (x @ params["params"][name]["kernel"] for name in ("query", "key", "value"))
by_hand = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((6, 6), bool)), q @ k.T / np.sqrt(2), -jnp.inf), axis=1) @ v
np.testing.assert_allclose(head.apply(params, x[None])[0], by_hand, atol=1e-6)
print(np.asarray(by_hand).round(4))

# %% [markdown]
# ## Heads side by side
#
# `StackedHeads` concatenates the outputs of several heads, each of which reads the full input. `MultiHeadAttention`
# keeps their matrices in one array and adds a projection of the joined outputs; its head i is the single head with
# slice i of the parameters.

# %%
stacked = StackedHeads(num_heads=2, head_dim=2)
print("stacked:", stacked.init_with_output(jax.random.key(0), x[None])[0].shape)
multi = MultiHeadAttention(num_heads=2, head_dim=2, use_bias=False, mask=Causal())
params = multi.init(jax.random.key(0), x[None])["params"]
slices = {name: {"kernel": jnp.moveaxis(params[name]["kernel"], 1, 0)} for name in ("query", "key", "value")}
one = Head(head_dim=2)
heads = jax.vmap(lambda p: one.apply({"params": p}, x[None])[0])(slices)  # [heads, length, head_dim]
joined = jnp.einsum("htd,hdf->tf", heads, params["out"]["kernel"])
np.testing.assert_allclose(multi.apply({"params": params}, x[None])[0], joined, atol=1e-6)

_, state = multi.apply({"params": params}, x[None], mutable=["intermediates"])
first, second = state["intermediates"]["attention_weights"][0][0]
show(first, "Head 0, untrained: each head looks in its own way")
show(second, "Head 1, untrained: at the same words with other weights")
