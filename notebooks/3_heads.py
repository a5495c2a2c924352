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
# # 3 Heads
#
# This lesson covers one head as a formula, several heads side by side, and the module that computes them all at once.
# You will see what a head reads (the full embedding, not a chunk of it), what heads cost (together hardly more than one
# wide head), where keys and values may come from (another sequence), and how heads can share them. Exercises 3.2 and
# 3.3 of document 001 are solved along the way.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import attnlab
from attnlab import plots
from attnlab.data.tasks import pairs
from attnlab.masks import Causal
from attnlab.nn import Head, KVCache, MultiHeadAttention, StackedHeads
from attnlab.study.registry import load

np.set_printoptions(precision=3, suppress=True)

words = ["el", "perro", "persiguió", "al", "gato", "y", "lo", "atrapó"]
T, F = 8, 12
x = jax.random.normal(jax.random.key(0), (1, T, F))  # [batch, length, features]

alignment_study = load("alignment")

# %% [markdown]
# ## One head
#
# $\mathrm{softmax}\big(x W_q (x W_k)^\top / \sqrt{d_k}\big)\, x W_v$ (Vaswani et al. 2017, equation 1), with a causal
# mask. `Head` has the three matrices as parameters, `[features, head_dim]`, without biases.

# %%
head = Head(head_dim=4)
params = head.init(jax.random.key(1), x)
q, k, v = (x @ params["params"][name]["kernel"] for name in ("query", "key", "value"))
visible = jnp.tril(jnp.ones((T, T), bool))
scores = jnp.where(visible, q @ k.swapaxes(-1, -2) / np.sqrt(4), -jnp.inf)
np.testing.assert_allclose(head.apply(params, x), jax.nn.softmax(scores, axis=-1) @ v, atol=1e-6)
print(jax.tree.map(jnp.shape, params["params"]))

# %% [markdown]
# Documents 000 and 001 store a triangle of the maximal length and crop it to the current one, `tril[:T, :T]`.
# `Causal()` is a rule without a size: the same head works for any length. And as no word attends to a later one, the
# first five words give the same outputs alone as in the full sentence.

# %%
np.testing.assert_allclose(head.apply(params, x[:, :5]), head.apply(params, x)[:, :5], atol=1e-6)

# %% [markdown]
# ## Heads side by side
#
# `StackedHeads` is the wrapper of document 001: each head has its own three matrices, and the outputs are concatenated.
# Its parameters are those of `Head` with a leading axis for the head.

# %%
stacked = StackedHeads(num_heads=3, head_dim=4)
params = stacked.init(jax.random.key(2), x)
print(jax.tree.map(jnp.shape, params["params"]["heads"]))
each = [jax.tree.map(lambda p, h=h: p[h], params["params"]["heads"]) for h in range(3)]
one_by_one = [Head(head_dim=4).apply({"params": p}, x) for p in each]
np.testing.assert_allclose(stacked.apply(params, x), jnp.concatenate(one_by_one, axis=-1), atol=1e-6)

# %% [markdown]
# **Exercise 3.2.** Two heads of width 2 give four output dimensions. How do you get two? With two heads of width 1.

# %%
batch = jnp.ones((2, 6, 3))
for head_dim in (2, 1):
    out, _ = StackedHeads(num_heads=2, head_dim=head_dim).init_with_output(jax.random.key(0), batch)
    print(f"2 heads of width {head_dim}: {out.shape}")

# %% [markdown]
# ## One array for all heads
#
# $\mathrm{Concat}(\mathrm{head}_1, \dots, \mathrm{head}_H)\, W_O$ (Vaswani et al. 2017, section 3.2.2).
# `MultiHeadAttention` stores the matrices of all heads in one array, `[features, heads, head_dim]`, and adds the output
# projection. Its head $i$ equals `Head` with slice $i$; `jax.vmap` runs over the slices.

# %%
multi = MultiHeadAttention(num_heads=3, use_bias=False, mask=Causal())
params = multi.init(jax.random.key(3), x)["params"]
print(jax.tree.map(jnp.shape, params))

slices = {name: {"kernel": jnp.moveaxis(params[name]["kernel"], 1, 0)} for name in ("query", "key", "value")}
heads = jax.vmap(lambda p: Head(head_dim=4).apply({"params": p}, x))(slices)  # [heads, batch, length, head_dim]
joined = jnp.concatenate(list(heads), axis=-1) @ params["out"]["kernel"].reshape(F, F)
np.testing.assert_allclose(multi.apply({"params": params}, x), joined, atol=1e-6)

# %% [markdown]
# ## Every head reads the full embedding
#
# Document 000 says that the embedding is split into chunks, one per head. In fact the *projection* is split: one wide
# product $x W$ is reshaped to add a head axis. Each column of $W$ still reads all features.

# %%
wide = x @ params["query"]["kernel"].reshape(F, F)
np.testing.assert_allclose(
    wide.reshape(1, T, 3, 4), jnp.einsum("btf,fhd->bthd", x, params["query"]["kernel"]), atol=1e-5
)

# %% [markdown]
# So the output of head 0 must change with the last features of the input. We differentiate it with respect to each
# feature, once for head 0 as it is, and once for a head 0 that only gets the first third of the embedding.


# %%
def full(x):
    return Head(head_dim=4).apply({"params": jax.tree.map(lambda p: p[0], slices)}, x)


def chunked(x):
    first_rows = jax.tree.map(lambda p: p[0, :4], slices)
    return Head(head_dim=4).apply({"params": first_rows}, x[..., :4])


changed = x.at[..., -4:].add(1.0)
print("wrong, split embedding:  head 0 changes by", jnp.abs(chunked(changed) - chunked(x)).max())
print("right, split projection: head 0 changes by", jnp.abs(full(changed) - full(x)).max())


def sensitivity(head):
    """Norm of the derivative of the head's output with respect to each input feature."""
    jacobian = jax.jacobian(head)(x)  # [1, T, head_dim, 1, T, F]
    return jnp.sqrt((jacobian**2).sum(axis=(0, 1, 2, 3, 4)))


features = np.arange(F)
plots.lines(
    {
        "right: the projection is split": (features, sensitivity(full)),
        "wrong: the embedding is split": (features, sensitivity(chunked)),
    },
    "Head 0 of three reads all twelve features; with a split embedding it would ignore eight",
    x="input feature (index)",
    y="‖∂ output of head 0 / ∂ feature‖",
)

# %% [markdown]
# The width is divided among the heads: $d_k = d_v = d_{model} / H$. If the division leaves a remainder, document 001
# stops at an `assert`; here the error message says what to change.

# %%
try:
    MultiHeadAttention(num_heads=5).init(jax.random.key(0), x)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Sixteen heads cost hardly more than one
#
# One head of width $d$ over $n$ words takes four projections, $8 n d^2$ operations, and two products of size $n^2 d$,
# $4 n^2 d$ operations. $H$ heads of width $d / H$ do the same products in smaller pieces; only the softmax is computed
# $H$ times. If every head had width $d$, everything would be computed $H$ times. XLA counts the operations of a
# compiled program:

# %%
n, d = 256, 256
counts = np.array([1, 2, 4, 8, 16])
inputs = jax.ShapeDtypeStruct((1, n, d), jnp.float32)


def cost(num_heads, head_dim):
    """(operations, parameters), without running anything."""
    module = MultiHeadAttention(num_heads, head_dim, use_bias=False, impl="dense")
    params = jax.eval_shape(module.init, jax.random.key(0), inputs)
    compiled = jax.jit(module.apply).lower(params, inputs).compile()
    return compiled.cost_analysis()["flops"], sum(leaf.size for leaf in jax.tree.leaves(params))


shared, shared_parameters = np.array([cost(h, d // h) for h in counts], int).T
full, full_parameters = np.array([cost(h, d) for h in counts], int).T
formula = 8 * n * d**2 + 4 * n**2 * d
np.testing.assert_array_equal(shared_parameters, 4 * d**2)
np.testing.assert_array_equal(full_parameters, 4 * d**2 * counts)
print("parameters, d / H wide:", shared_parameters, "\nparameters, d wide:    ", full_parameters)

# %%
more = 100 * (shared / formula - 1)
plots.panels(
    {
        "all operations": {
            "series": {
                "each head d wide": (counts, full / 1e9),
                "each head d / H wide": (counts, shared / 1e9),
                "formula for one head": (counts, np.full(len(counts), formula / 1e9)),
            },
            "x": "heads, H",
            "y": "operations (GFLOP)",
            "log": "xy",
            "dashed": ["formula for one head"],
        },
        "operations that the formula omits": {
            "series": {
                "each head d / H wide": (counts, more),
                "softmax: 6 per weight": (counts, 100 * 6 * counts * n**2 / formula),
            },
            "x": "heads, H",
            "y": "operations beyond the formula (%)",
            "log": "x",
            "dashed": ["softmax: 6 per weight"],
        },
    },
    f"Sixteen heads that share the width cost {more[-1]:.0f} % more than one head's products: only the softmax grows",
)

# %% [markdown]
# ## Exercise 3.3: the size of GPT-2
#
# The smallest GPT-2 has width 768, 12 heads and a context of 1,024 tokens (Radford et al. 2019). Four matrices and four
# biases make $4 (768^2 + 768)$ parameters; document 001 omits the biases of query, key and value. We run a batch of
# two.

# %%
gpt2 = MultiHeadAttention(num_heads=12, mask=Causal())
x = jax.random.normal(jax.random.key(0), (2, 1024, 768))
params = gpt2.init(jax.random.key(1), x[:, :1])
out = jax.jit(gpt2.apply)(params, x)

print(jax.tree.map(jnp.shape, params["params"]["query"]), "→", out.shape)
size = sum(leaf.size for leaf in jax.tree.leaves(params))
print(f"{size:,} parameters; without the three biases {size - 3 * 768:,}")
assert size == 4 * (768**2 + 768) and size - 3 * 768 == 4 * 768**2 + 768

# %% [markdown]
# The attention weights of that batch are $2 \cdot 12 \cdot 1024^2$ numbers. They are never all in memory: at this
# length `attnlab.attention` works tile by tile. `attnlab.explain` says which backend runs and why.

# %%
q = k = v = jnp.zeros((2, 1024, 12, 64))
print(f"all weights: {2 * 12 * 1024**2 * 4 / 2**20:.0f} MiB")
print(attnlab.explain(q, k, v, mask=Causal()))

# %% [markdown]
# ## What several heads are for
#
# A head is defined by its matrices. Here are four that we set by hand. The inputs are one-hot positions; the query of
# head $h$ matches position $i - h$, and every key is its own position. If there is no such position, the query is zero
# and the head attends equally to all visible words.

# %%
positions = jnp.eye(T)[None]
back = [10 * np.sqrt(T) * jnp.eye(T, k=-h) for h in range(4)]  # the query at position i matches key i − h
same = jnp.repeat(jnp.eye(T)[:, None], 4, axis=1)  # [F, heads, head_dim]
params = {
    "query": {"kernel": jnp.stack(back, axis=1)},
    "key": {"kernel": same},
    "value": {"kernel": same},
    "out": {"kernel": jnp.moveaxis(same, 0, -1)},
}
four = MultiHeadAttention(num_heads=4, head_dim=T, use_bias=False, mask=Causal())
_, state = four.apply({"params": params}, positions, mutable=["intermediates"])
weights = state["intermediates"]["attention_weights"][0][0]  # [heads, query, key]
for h in range(4):
    np.testing.assert_array_equal(weights[h].argmax(axis=-1)[h:], np.arange(T - h))
plots.heads(
    weights,
    "Four heads of one layer attend to four places at once: head h attends h words back",
    tokens=words,
    mask=Causal(),
    names=["head 0: itself", "head 1: one back", "head 2: two back", "head 3: three back"],
    columns=2,
)

# %% [markdown]
# One head cannot replace two. If it divides its attention between two words, it returns their mean, which does not tell
# which word was where: swap them, and nothing changes. Two heads keep them apart.

# %%
values = jax.random.normal(jax.random.key(4), (T, 2))
swapped = values.at[jnp.array([4, 6])].set(values[jnp.array([6, 4])])  # "gato" and "lo", one and three before "atrapó"
one = weights[jnp.array([1, 3]), 7].mean(axis=0)
two = weights[jnp.array([1, 3]), 7]
print("one head: ", one @ values, "and swapped", one @ swapped)
print("two heads:", (two @ values).ravel(), "and swapped", (two @ swapped).ravel())
np.testing.assert_allclose(one @ values, one @ swapped, atol=1e-5)

# %% [markdown]
# ## Cross-attention
#
# Queries may come from one sequence, and keys and values from another, the memory: the decoder of a translation model
# attends to the output of its encoder (document 003 has the table, but no code). `inputs_kv` is the memory.
# Self-attention is the special case where both sequences are the same.

# %%
x = jax.random.normal(jax.random.key(0), (1, T, F))
memory = jax.random.normal(jax.random.key(5), (1, 5, 6))  # another length, another width
cross = MultiHeadAttention(num_heads=3, use_bias=False)
params = cross.init(jax.random.key(6), x, memory)["params"]
q = jnp.einsum("btf,fhd->bthd", x, params["query"]["kernel"])
k, v = (jnp.einsum("btf,fhd->bthd", memory, params[name]["kernel"]) for name in ("key", "value"))
by_hand = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(4), axis=-1)
mixed = jnp.einsum("bhqk,bkhd->bqhd", by_hand, v)
np.testing.assert_allclose(
    cross.apply({"params": params}, x, memory), jnp.einsum("bqhd,hdf->bqf", mixed, params["out"]["kernel"]), atol=1e-5
)
print("weights [batch, heads, queries, keys]:", by_hand.shape)

params = cross.init(jax.random.key(6), x)
np.testing.assert_array_equal(cross.apply(params, x), cross.apply(params, x, inputs_kv=x))

# %% [markdown]
# This is attention as alignment, its original purpose (Bahdanau et al. 2015; document 004): which input word
# corresponds to which output word? First we skip the training and construct the vectors. Each English word is a random
# vector, and each Spanish word is the vector of its translation plus noise. With identity matrices, cross-attention
# finds the pairs.

# %%
spanish = ["el", "gato", "negro", "duerme", "hoy"]
english = ["the", "black", "cat", "sleeps", "today"]
translation = [0, 2, 1, 3, 4]  # of each Spanish word
width = 32
memory = jax.random.normal(jax.random.key(7), (1, 5, width))
x = memory[:, jnp.array(translation)] + 0.8 * jax.random.normal(jax.random.key(8), (1, 5, width))
unit = jnp.eye(width)
params = {name: {"kernel": unit[:, None]} for name in ("query", "key", "value")} | {"out": {"kernel": unit[None]}}
aligner = MultiHeadAttention(num_heads=1, use_bias=False)
_, state = aligner.apply({"params": params}, x, memory, mutable=["intermediates"])
alignment = state["intermediates"]["attention_weights"][0][0, 0]
np.testing.assert_array_equal(alignment.argmax(axis=-1), translation)
plots.weights(
    alignment,
    '"gato" attends to "cat" and "negro" to "black", although the order differs',
    queries=spanish,
    keys=english,
)

# %% [markdown]
# Now with training. A recurrent encoder–decoder with additive attention, $e_{ij} = w^\top \tanh(W s_i + U h_j)$, learns
# to reverse sequences over 31 symbols, without any supervision of the alignment. The source below was not in the
# training data, and neither was any other source of its length, 9 symbols. Additive and dot-product attention both
# learn this alignment (`python -m attnlab.study alignment`).

# %%
model, params = alignment_study.train("reverse", "additive", seed=0, steps=600)
unseen = pairs("reverse", 0, batch_size=64, lengths=(9,), held_out=True)
learned = attnlab.nn.alignment(model, params, unseen.source, unseen.lengths, unseen.inputs)
right = (learned.argmax(axis=-1) == unseen.alignment)[:, :9].mean()
print(f"on 64 held-out sources {100 * right:.1f} % of the outputs attend most to the right symbol")
symbols = [chr(ord("a") - 1 + s) if s < 27 else str(s - 27) for s in unseen.source[0]]
plots.weights(
    learned[0, :9],
    "Trained to reverse, attention runs backwards through a source not seen in training",
    queries=symbols[::-1],
    keys=symbols,
    marks=unseen.alignment[0, :9],
    mark_label="the correct source symbol",
    x="source symbol (key)",
    y="output symbol (query)",
)

# %% [markdown]
# ## Heads that share keys and values
#
# During generation a model caches the keys and values of all words so far. In grouped-query attention (Ainslie et al.
# 2023) several heads share one key-value head, `kv_heads`; with a single one it is multi-query attention (Shazeer
# 2019). Each head still has its own queries. The result equals full attention with repeated key and value matrices.

# %%
x = jax.random.normal(jax.random.key(0), (1, T, F))
grouped = MultiHeadAttention(num_heads=6, kv_heads=2, use_bias=False, mask=Causal())
params = grouped.init(jax.random.key(9), x)["params"]
print(jax.tree.map(jnp.shape, params))
repeated = params | {name: {"kernel": jnp.repeat(params[name]["kernel"], 3, axis=1)} for name in ("key", "value")}
full = MultiHeadAttention(num_heads=6, use_bias=False, mask=Causal())
np.testing.assert_allclose(grouped.apply({"params": params}, x), full.apply({"params": repeated}, x), atol=1e-6)

# %%
counts = (1, 2, 3, 4, 6, 12)
parameters, cached = [], []
for kv_heads in counts:
    module = MultiHeadAttention(num_heads=12, kv_heads=kv_heads)
    shapes = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1, 768), jnp.float32))
    parameters.append(sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6)
    cache = KVCache.empty(batch=1, capacity=1024, kv_heads=kv_heads, head_dim=64)
    cached.append((cache.key.nbytes + cache.value.nbytes) / 2**20)
print("parameters (millions):", np.array(parameters), "\ncache of 1,024 tokens (MiB):", np.array(cached))
plots.lines(
    {
        "cache": (counts, 100 * np.array(cached) / cached[-1]),
        "parameters": (counts, 100 * np.array(parameters) / parameters[-1]),
    },
    f"One key-value head for twelve: the cache shrinks {cached[-1] / cached[0]:.0f} times, "
    f"the parameters {parameters[-1] / parameters[0]:.1f} times",
    x="key-value heads, for 12 heads",
    y="relative to twelve key-value heads (%)",
)
