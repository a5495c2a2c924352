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
# # 6 Long sequences
#
# This lesson measures what attention costs on long sequences, and what can be done about it. Tiling saves memory
# without changing the result; windows and sparse blocks save work by masking more; linear attention is a different
# function. At the end we measure the table of document 002: the cost and the reach of recurrent and convolutional
# layers.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import attnlab
from attnlab import plots
from attnlab.masks import BlockSparse, Causal, MaskFn, SlidingWindow
from attnlab.nn import GRU, Block, CausalConv, Mlp, MultiHeadAttention
from attnlab.support import timing

lengths = [256, 512, 1024, 2048, 4096]
heads, features = 4, 32


def abstract(*shape):
    """The shape of an array without the array, which is enough to compile for it."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def attend(impl, mask=None, block_sizes=None):
    """Attention as a jitted function of q, k and v."""
    return jax.jit(lambda q, k, v: attnlab.attention(q, k, v, mask=mask, impl=impl, block_sizes=block_sizes))


def draw(length, heads=heads, features=features, seed=0):
    """Random q, k and v, `[3, length, heads, features]`."""
    return jax.random.normal(jax.random.key(seed), (3, length, heads, features))


# %% [markdown]
# ## The square, counted
#
# $QK^\top$ takes $2n^2d$ operations and so does the product with $V$: $4n^2d$ for d features in all heads together. The
# dense form also writes all $n^2$ scores of every head to memory. XLA reports both without running anything.
#
# One caveat: XLA counts a loop body once, however often the loop runs. The blockwise form loops over tiles, so its
# count must be multiplied by the number of tiles. The figure shows the wrong count next to the right one:

# %%
tile = 256
counted = {"dense": [], "blockwise": [], "blockwise, as reported (wrong)": []}
memory = {"dense": [], "blockwise": []}
for n in lengths:
    shapes = [abstract(n, heads, features)] * 3
    dense = attend("dense").lower(*shapes).compile()
    tiled = attend("blockwise", block_sizes=(tile, tile)).lower(*shapes).compile()
    reported = tiled.cost_analysis()["flops"]
    counted["dense"].append(dense.cost_analysis()["flops"])
    counted["blockwise, as reported (wrong)"].append(reported)
    counted["blockwise"].append(reported * (n // tile) ** 2)
    memory["dense"].append(dense.memory_analysis().temp_size_in_bytes / 2**20)
    memory["blockwise"].append(tiled.memory_analysis().temp_size_in_bytes / 2**20)

formula = [4 * n * n * heads * features for n in lengths]
np.testing.assert_allclose(counted["dense"], formula, rtol=0.06)  # the softmax adds a little
np.testing.assert_allclose(counted["blockwise"], formula, rtol=0.06)
scores = [heads * n * n * 4 / 2**20 for n in lengths]
saved = memory["dense"][-1] / memory["blockwise"][-1]
plots.panels(
    {
        "operations: the same for both": {
            "series": {name: (lengths, values) for name, values in counted.items()} | {"4·n²·d": (lengths, formula)},
            "x": "n (tokens)",
            "y": "operations",
            "log": "xy",
            "dashed": ("4·n²·d",),
        },
        "temporary memory: n² against n": {
            "series": {name: (lengths, values) for name, values in memory.items()}
            | {"one array of scores": (lengths, scores)},
            "x": "n (tokens)",
            "y": "memory (MiB)",
            "log": "xy",
            "dashed": ("one array of scores",),
        },
    },
    f"Tiling takes the same operations and, at n = {n:,}, 1/{saved:.0f} of the memory",
)

# %% [markdown]
# ## Exact, tile by tile
#
# Nothing is approximated. Iterating over blocks of keys, one keeps for every query the running maximum m of the scores,
# the denominator l, which is the sum of $e^{s - m}$, and the accumulator o, which is the weighted sum of values. When
# the maximum grows, l and o are rescaled by $e^{m - m'}$ (Milakov & Gimelshein 2018; Rabe & Staats 2021;
# FlashAttention, Dao et al. 2022). The arithmetic is that of the dense form; the savings come from not writing scores
# to memory and reading them back. By hand, and with attnlab:

# %%
q, k, v = draw(256, heads=1)[:, :, 0]
m, l, o = jnp.full((256, 1), -jnp.inf), jnp.zeros((256, 1)), jnp.zeros((256, features))
for start in range(0, 256, 64):
    s = q @ k[start : start + 64].T / np.sqrt(features)
    largest = jnp.maximum(m, s.max(axis=1, keepdims=True))
    p = jnp.exp(s - largest)
    l = l * jnp.exp(m - largest) + p.sum(axis=1, keepdims=True)
    o = o * jnp.exp(m - largest) + p @ v[start : start + 64]
    m = largest
np.testing.assert_allclose(o / l, attend("dense")(q[:, None], k[:, None], v[:, None])[:, 0], atol=1e-5)

q, k, v = draw(1024)
dense, tiled = attend("dense", Causal())(q, k, v), attend("blockwise", Causal())(q, k, v)
np.testing.assert_allclose(tiled, dense, atol=1e-5)
print(f"dense and blockwise differ by at most {abs(dense - tiled).max():.1e}")

# %% [markdown]
# ## Fewer pairs
#
# To do less work, mask more pairs. A window of r neighbours costs $O(r \cdot n \cdot d)$ (Vaswani et al. 2017, section
# 4). Sparse patterns add a few distant keys: blocks visible to all queries, or every eighth token (Child et al. 2019).
# In attnlab these are masks, and any rule can be one.

# %%
i, j = np.indices((8, 8))
local_and_global = BlockSparse(jnp.asarray((abs(i - j) <= 1) | (j == 0) | (i == 0)), size=4)
patterns = {
    "causal": Causal(),
    "window of 6": SlidingWindow(left=5),
    "window of 6, both ways": SlidingWindow(left=3, right=2),
    "blocks: local + global": local_and_global,
    "the same, causal": local_and_global & Causal(),
    "window + every eighth": Causal() & (SlidingWindow(left=5) | MaskFn(lambda b, h, i, j: j % 8 == 7)),
}
share = {name: float(mask.dense(32, 32).mean()) for name, mask in patterns.items()}
plots.masks(
    {f"{name}: {part:.0%}": patterns[name] for name, part in share.items()},
    f"A causal mask keeps {share['causal']:.0%} of all pairs visible, sparse masks down to {min(share.values()):.0%}",
    length=32,
    columns=3,
)

# %% [markdown]
# A mask saves time only if entire tiles are masked. `mask.tiles` says which tiles may contain a visible pair; the
# blockwise form skips the others. Their number grows with n for the window, and with $n^2$ for the causal mask.

# %%
window = SlidingWindow(left=127)
print("tiles of 64 × 64 to compute:")
print("n        all  causal  window of 128")
for n in lengths:
    causal, near = (int(mask.tiles(n, n, (64, 64))[0].sum()) for mask in (Causal(), window))
    print(f"{n:5}{(n // 64) ** 2:7}{causal:8}{near:8}")
    assert near <= 3 * (n // 64)
q, k, v = draw(1024)
np.testing.assert_allclose(attend("blockwise", window)(q, k, v), attend("dense", window)(q, k, v), atol=1e-5)

# %% [markdown]
# ## Linear attention is a different function
#
# If $e^{q \cdot k}$ is replaced by a product of features $\phi(q) \cdot \phi(k)$, the sum over keys becomes a running
# state (Katharopoulos et al. 2020):
#
# $$o_i = \frac{\phi(q_i)^\top S_i}{\phi(q_i)^\top z_i}, \quad S_i = S_{i-1} + \phi(k_i) v_i^\top, \quad
# z_i = z_{i-1} + \phi(k_i)$$
#
# By hand, token by token, and with attnlab's three forms: with all weights computed explicitly, with a state passed
# from token to token, and with a state passed from chunk to chunk.

# %%
q, k, v = draw(200, heads=1, features=8)


def phi(x):
    return jax.nn.elu(x) + 1


state, total, by_hand = jnp.zeros((8, 8)), jnp.zeros(8), []
for q_i, k_i, v_i in zip(*(x[:, 0] for x in (q, k, v))):
    state, total = state + jnp.outer(phi(k_i), v_i), total + phi(k_i)
    by_hand.append(phi(q_i) @ state / (phi(q_i) @ total))
for form in ("naive", "recurrent", "chunked"):
    np.testing.assert_allclose(attnlab.linear_attention(q, k, v, impl=form)[:, 0], jnp.array(by_hand), atol=1e-5)

print("numbers kept for the next token, 4 heads of 32:")
for n in (16, 1_000, 100_000):
    print(f"  after {n:7,} tokens: keys and values {2 * n * heads * features:10,}, state {heads * 32 * (32 + 1):,}")

# %% [markdown]
# It is not an approximation of softmax attention, and nothing makes it converge to it: $\phi = \text{elu} + 1$ gives
# different weights. There *are* features that approximate softmax attention, because for normal w (Choromanski et al.
# 2021, lemma 1)
#
# $$e^{q \cdot k} = \mathbb{E}_w \left[ e^{w \cdot q - |q|^2/2} \; e^{w \cdot k - |k|^2/2} \right]$$
#
# so m random vectors w give m features, and the error falls with m, roughly as $1/\sqrt m$.


# %%
def random_features(m, seed=0):
    """φ with φ(q)·φ(k) ≈ exp(q·k), from m random w."""
    w = jax.random.normal(jax.random.key(seed), (m, 16))
    return lambda x: jnp.exp(x @ w.T - (x**2).sum(axis=-1, keepdims=True) / 2) / np.sqrt(m)


q, k, v = draw(256, heads=1, features=16)
q, k = 0.4 * q / 2, 0.4 * k / 2  # with these √16 = 4 is divided by already
exact = attnlab.attention(q, k, v, mask=Causal(), scale=1.0)
many = random_features(2**16)
np.testing.assert_allclose(many(q[0]) @ many(k[1]).T, jnp.exp(q[0] @ k[1].T), rtol=0.05)


def error(out):
    return float(jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact))


approximate = jax.jit(
    lambda m, seed: attnlab.linear_attention(q, k, v, feature_map=random_features(m, seed)), static_argnums=0
)
counts = [16, 64, 256, 1024, 4096]
errors = [np.mean([error(approximate(m, seed)) for seed in range(4)]) for m in counts]
other = error(attnlab.linear_attention(q, k, v))
plots.lines(
    {
        "random features": (counts, errors),
        "elu + 1": (counts, [other] * len(counts)),
        "1/√m": (counts, errors[0] * np.sqrt(counts[0] / np.array(counts))),
    },
    f"The error of random features falls with their number; that of elu + 1 stays at {other:.0%}",
    x="m (random features)",
    y="relative distance from softmax attention",
    log="xy",
    dashed=("1/√m",),
)

# %% [markdown]
# Here are the weights, on a shorter sequence with larger scores: the softmax concentrates on a few keys,
# $\text{elu} + 1$ spreads out, and random features imitate the softmax. Larger scores need more features.

# %%
q, k = 2.5 * q[:24], 2.5 * k[:24]


def as_weights(feature_map):
    """Causal weights φ(q)·φ(k), each row divided by its sum."""
    products = jnp.tril(feature_map(q[:, 0]) @ feature_map(k[:, 0]).T)
    return products / products.sum(axis=1, keepdims=True)


drawn = {
    "softmax": attnlab.attention_weights(q, k, mask=Causal(), scale=1.0)[0],
    "elu + 1": as_weights(phi),
    "16,384 random features": as_weights(random_features(2**14)),
}
moved = {name: float(abs(weights - drawn["softmax"]).sum(axis=1).mean() / 2) for name, weights in drawn.items()}
plots.heads(
    np.stack(list(drawn.values())),
    f"Weight placed differently than by softmax: {moved['elu + 1']:.0%} for elu + 1, "
    f"{moved['16,384 random features']:.0%} for random features",
    names=list(drawn),
    mask=Causal(),
    columns=3,
)

# %% [markdown]
# ## Time
#
# These are times on this machine, for two heads of width 32 and the window of 128. The contenders alternate and we take
# medians, so that other load on the machine affects all of them alike. Both axes are logarithmic: times that grow as n
# are parallel to the lower dashed line, times that grow as n² to the upper one. The dense form may jump where its
# scores no longer fit into the cache; tiling avoids that memory traffic.

# %%
contenders = {
    "dense": attend("dense", Causal()),
    "blockwise": attend("blockwise", Causal()),
    "window": attend("blockwise", window),
    "linear": jax.jit(attnlab.linear_attention),
}
longer = [512, 1024, 2048, 4096]
seconds = {name: [] for name in contenders}
for n in longer:
    qkv = draw(n, heads=2)
    raced = timing.alternate({name: lambda f=f, qkv=qkv: f(*qkv) for name, f in contenders.items()}, rounds=7)
    for name, taken in raced.items():
        seconds[name].append(np.median(taken))
    print(timing.line(f"n = {n:,}", raced))
n = np.array(longer)
plots.lines(
    {name: (longer, 1e3 * np.array(taken)) for name, taken in seconds.items()}
    | {
        "n²": (longer, 1e3 * seconds["dense"][-1] * (n / n[-1]) ** 2),
        "n": (longer, 1e3 * seconds["linear"][-1] * n / n[-1]),
    },
    f"At n = {n[-1]:,} dense attention takes {timing.ratio(raced, 'dense', 'blockwise'):.1f} × as long as blockwise, "
    f"{timing.ratio(raced, 'dense', 'window'):.0f} × as long as a window",
    x="n (tokens)",
    y="time (ms)",
    log="xy",
    dashed=("n²", "n"),
)

# %% [markdown]
# ## What the table leaves out
#
# Document 002 prints the table of Vaswani et al. (2017), where attention costs $n^2 d$ per layer. That covers the
# products of queries, keys and values. The four projections cost another $8 n d^2$, which is the larger part up to
# n = 2d.

# %%
width = 256


def operations(layer, n, d):
    """XLA's operation count for a layer on `[1, n, d]`, where loop bodies count once."""
    x = abstract(1, n, d)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    return jax.jit(layer.apply).lower(variables, x).cost_analysis()["flops"]


def products(n, d):
    """The operations of attention alone."""
    return attend("dense").lower(*[abstract(n, 1, d)] * 3).cost_analysis()["flops"]


alone = np.array([products(n, width) for n in lengths])
full = np.array([operations(MultiHeadAttention(1, use_bias=False, impl="dense"), n, width) for n in lengths])
np.testing.assert_allclose(full - alone, [8 * n * width**2 for n in lengths], rtol=0.02)
crossing = np.interp(0, np.log(alone / (full - alone)), lengths)
plots.lines(
    {"scores and mixing: 4·n²·d": (lengths, alone), "four projections: 8·n·d²": (lengths, full - alone)},
    f"For d = {width} the projections cost more than attention itself up to n = {crossing:.0f}",
    x="n (tokens)",
    y="operations",
    log="xy",
)

# %% [markdown]
# ## The table, measured
#
# `GRU` and `CausalConv` can replace attention in a `Block`. A GRU processes tokens in sequence: n steps, each of which
# depends on the previous one. A convolution of width k processes all tokens at once. The exponents below are the
# $\log_2$ of the growth of the count when n, d, or the neighbourhood (k or r) doubles, starting from n = 16,384, d =
# 4,096, k = 4 and r = 512: large enough for small terms to vanish, as nothing is run. XLA counts the GRU's loop once,
# so its count is multiplied by n; for the window, the count of a tile is multiplied by the number of tiles not skipped.

# %%
block = Block(GRU(), Mlp())
print("a block with a GRU inside:", block.init_with_output(jax.random.key(0), jnp.ones((1, 5, 8)))[0].shape)


def in_window(n, d, r):
    tiles = int(SlidingWindow(left=r - 1).tiles(n, n, (16, 16))[0].sum())
    return tiles * products(16, d)


costs = {
    "self-attention": (lambda n, d, k: products(n, d), "n²·d", "1", "1"),
    "  with projections": (
        lambda n, d, k: operations(MultiHeadAttention(1, impl="dense"), n, d),
        "n²·d + n·d²",
        "1",
        "1",
    ),
    "recurrent": (lambda n, d, k: n * operations(GRU(), n, d), "n·d²", "n", "n"),
    "convolutional": (
        lambda n, d, k: operations(CausalConv(kernel_size=k), n, d),
        "k·n·d²",
        "1",
        "n/k, dilated log_k n",
    ),
    "attention in a window": (in_window, "r·n·d", "1", "n/r"),
}
print(f"{'layer':23}{'operations':14}{'of n':>6}{'of d':>6}{'of k, r':>9}  {'sequential':15}longest path")
for name, (count, formula, steps, path) in costs.items():
    n, d, near = 16_384, 4096, 512 if name.endswith("window") else 4
    base = count(n, d, near)
    of_n, of_d, of_near = (
        np.log2(count(*bigger) / base) for bigger in ((2 * n, d, near), (n, 2 * d, near), (n, d, 2 * near))
    )
    print(f"{name:23}{formula:14}{of_n:6.2f}{of_d:6.2f}{of_near:9.2f}  {steps:15}{path}")

# %% [markdown]
# ## How far a stack reaches
#
# The table gives convolutions a longest path of $\log_k n$. That only holds for dilated ones (van den Oord et al.
# 2016), with dilations 1, k, k², …: L layers reach $k^L$ tokens. L undilated layers, or layers with a window, reach $1
# + L(k - 1)$ tokens, so n tokens take about $n/k$ layers. We check the formula against the derivative of the last
# output, which shows the inputs that it depends on.

# %%
n, k, r = 256, 3, 6
stacks = {
    "convolution, k = 3": lambda layer: CausalConv(kernel_size=k),
    "dilated by 1, 3, 9, …": lambda layer: CausalConv(kernel_size=k, dilation=k**layer),
    "attention in a window of 6": lambda layer: MultiHeadAttention(num_heads=1, mask=SlidingWindow(left=r - 1)),
    "attention": lambda layer: MultiHeadAttention(num_heads=1, mask=Causal()),
}
depths = [1, 2, 3, 4, 5]


def reached(make):
    """The number of inputs that the last output depends on, after each of five layers."""

    def lasts(x):
        outputs = []
        for layer in range(5):
            x, _ = make(layer).init_with_output(jax.random.key(layer), x)
            outputs.append(x[0, -1].sum())
        return jnp.stack(outputs)

    jacobian = jax.jit(jax.jacrev(lasts))(jax.random.normal(jax.random.key(9), (1, n, 4)))  # [5, 1, n, 4]
    return (abs(jacobian[:, 0]).max(axis=-1) > 0).sum(axis=-1).tolist()


reach = {name: reached(make) for name, make in stacks.items()}
assert reach["convolution, k = 3"] == [1 + depth * (k - 1) for depth in depths]
assert reach["dilated by 1, 3, 9, …"] == [k**depth for depth in depths]
assert reach["attention in a window of 6"] == [1 + depth * (r - 1) for depth in depths]
assert reach["attention"] == [n] * 5
plots.lines(
    {name: ([str(depth) for depth in depths], tokens) for name, tokens in reach.items()},
    "L dilated layers reach 3^L tokens; undilated layers add a constant number each",
    x="layers",
    y="inputs that reach the last output (tokens)",
    log="y",
)

# %% [markdown]
# A GRU reaches all tokens in one layer, through n steps. How much of them arrives is another question: here is the norm
# of the derivative of the last output with respect to earlier inputs, for two untrained layers.

# %%
x = jax.random.normal(jax.random.key(0), (8, 128, 32))
back = np.arange(64)
sizes = {}
for name, layer in {"GRU": GRU(), "attention": MultiHeadAttention(num_heads=1, mask=Causal())}.items():
    variables = jax.jit(layer.init)(jax.random.key(1), x)
    _, pull = jax.vjp(jax.jit(lambda x, f=layer.apply, v=variables: f(v, x)[:, -1]), x)
    gradient = pull(jax.random.normal(jax.random.key(2), (8, 32)))[0]
    sizes[name] = np.asarray(jnp.linalg.norm(gradient, axis=-1).mean(axis=0))[::-1][:64]
half = np.log(2) / -np.polyfit(back[1:], np.log(sizes["GRU"][1:]), 1)[0]
plots.lines(
    {name: (back, size) for name, size in sizes.items()},
    f"A GRU's derivative halves every {half:.1f} tokens; that of attention does not decay",
    x="distance of the input (tokens back)",
    y="derivative of the last output (norm)",
    log="y",
    markers=False,
)
