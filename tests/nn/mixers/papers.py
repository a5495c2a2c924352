"""Whole layers in NumPy float64, from input to output, each written from its paper, for one sequence `[T, F]`.

`p` maps paths, such as "query/kernel", to the layer's parameters. The recurrences are loops over tokens and heads.
"""

import numpy as np

from tests.ops.recurrence import papers


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def rms(x, scale=1.0, epsilon=1e-5):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * scale


def rotated(x):
    """Rotate pairs (i, i + n/2) as complex numbers, `[T, H, n]`."""
    half = x.shape[-1] // 2
    frequencies = np.float64(np.float32(10_000.0 ** (-np.arange(half) / half)))  # rounded, as everywhere in attnlab
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def convolution(x, kernel, bias=0.0):
    """Gu and Dao 2023: a depthwise convolution; the last weight multiplies the current token."""
    width, y = len(kernel), np.zeros_like(x)
    for t in range(len(x)):
        for back in range(min(width, t + 1)):
            y[t] += kernel[width - 1 - back] * x[t - back]
    return y + bias


def causal_conv(x, p, *, dilation=1):
    """van den Oord et al. 2016, section 2.1; the kernel's last tap multiplies the current token."""
    kernel, out = p["conv/kernel"], p["conv/bias"]
    for back, tap in enumerate(kernel[::-1]):
        before = np.zeros_like(x)
        before[back * dilation :] = x[: max(0, len(x) - back * dilation)]
        out = out + before @ tap
    return out


def gated_conv(x, p):
    """A convolution times a linear layer, plus the input."""
    return convolution(x, p["conv/kernel"], p["conv/bias"]) * projected(x, p, "linear") + x


def gru(x, p):
    """Cho et al. 2014, with the reset gate after the product, as in cuDNN and Flax."""

    def linear(name, x):
        return x @ p[f"cell/{name}/kernel"] + p.get(f"cell/{name}/bias", 0)

    state, outs = np.zeros(p["cell/hn/kernel"].shape[0]), []
    for token in x:
        r, z = (sigmoid(linear(f"i{gate}", token) + linear(f"h{gate}", state)) for gate in "rz")
        state = (1 - z) * np.tanh(linear("in", token) + r * linear("hn", state)) + z * state
        outs.append(state)
    return np.stack(outs)


def by_head(recurrence, heads, *arrays):
    """Run `recurrence` on each head's arrays, `[T, H, V]`; groups of heads share an array with fewer heads."""
    outs = []
    for h in range(heads):
        outs.append(recurrence(*(x[:, h * x.shape[1] // heads] for x in arrays)))
    return np.stack(outs, axis=1)


def projected(x, p, name):
    return np.einsum("tf,f...->t...", x, p[f"{name}/kernel"]) + p.get(f"{name}/bias", 0)


def out(z, p):
    return np.einsum("thd,hdf->tf", z, p["out/kernel"]) + p.get("out/bias", 0)


def convolved(x, p):
    """Queries, keys and values, after their convolutions if they have any."""
    for name in ("query", "key", "value"):
        y, kernel = projected(x, p, name), p.get(f"{name}_conv/kernel")
        yield y if kernel is None else convolution(y, kernel)


def short(x, p):
    """Queries, keys and values after their convolutions and silu, q and k of unit norm, q over √K."""
    q, k, v = map(silu, convolved(x, p))
    q, k = (y / np.sqrt((y**2).sum(axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    return q / np.sqrt(q.shape[-1]), k, v


def gated_delta_net(x, p, *, negative=False):
    """Yang et al. 2025, section 3.3 and figure 1; without "a" and "gate" it is DeltaNet (Yang et al. 2024, 3.3)."""
    q, k, v = short(x, p)
    beta = sigmoid(projected(x, p, "b")) * (2 if negative else 1)
    alpha = np.ones_like(beta)
    if "A_log" in p:
        alpha = np.exp(-np.exp(p["A_log"]) * softplus(projected(x, p, "a") + p["dt_bias"]))
    z = rms(by_head(papers.gated_delta_net, v.shape[1], q, k, v, alpha, beta), p["norm/scale"])
    return out(z * silu(projected(x, p, "gate")) if "gate/kernel" in p else z, p)


def mamba2(x, p, *, groups, state):
    """Dao and Gu 2024, section 7 and figure 6: the parallel block; one projection gives z, x, B, C and dt."""
    heads = len(p["A_log"])
    inner, shared = len(p["norm/scale"]), groups * state
    z, xbc, dt = np.split(projected(x, p, "in"), (inner, 2 * inner + 2 * shared), axis=-1)
    xbc = silu(convolution(xbc, p["conv/kernel"], p["conv/bias"]) if "conv/kernel" in p else xbc)
    v, b, c = np.split(xbc, (inner, inner + shared), axis=-1)
    v, b, c = v.reshape(len(x), heads, -1), b.reshape(len(x), groups, -1), c.reshape(len(x), groups, -1)
    dt, a = softplus(dt + p["dt_bias"]), np.tile(-np.exp(p["A_log"]), (len(x), 1))
    y = by_head(lambda v, dt, a, b, c: papers.mamba2(v, dt, a[0], b, c), heads, v, dt, a, b, c) + p["D"][:, None] * v
    y = y.reshape(len(x), groups, -1) * silu(z).reshape(len(x), groups, -1)
    return out((rms(y).reshape(len(x), inner) * p["norm/scale"]).reshape(v.shape), p)


def gated_linear_attention(x, p):
    """Yang et al. 2023, sections 4.1 and 4.4: α = σ(x W₁ W₂ + b)^(1/16), output gate swish(x W + b)."""
    q, k, v = (projected(x, p, name) for name in ("query", "key", "value"))
    alpha = sigmoid(projected(projected(x, p, "decay_down"), p, "decay_up")) ** (1 / 16)
    z = by_head(papers.gla, v.shape[1], q / np.sqrt(q.shape[-1]), k, v, alpha)
    z = rms(z, p["norm/scale"])
    return out(z * silu(projected(x, p, "gate")) if "gate/kernel" in p else z, p)


def retention(x, p):
    """Sun et al. 2023, section 2: Q and K rotated by their positions as complex numbers, heads normalized and gated."""
    q, k, v = (projected(x, p, name) for name in ("query", "key", "value"))
    gamma = 1 - 2.0 ** (-5 - np.arange(v.shape[1]))
    z = by_head(
        lambda q, k, v, gamma: papers.retention(q, k, v, gamma[0]),
        v.shape[1],
        *(rotated(q) / np.sqrt(q.shape[-1]), rotated(k), v, np.tile(gamma, (len(x), 1))),
    )
    return out(rms(z) * silu(projected(x, p, "gate")) if "gate/kernel" in p else rms(z), p)


def elu_plus_one(y):
    return np.where(y > 0, y + 1, np.exp(y))


def linear_attention(x, p, *, normalized=True, feature_map=elu_plus_one):
    """Katharopoulos et al. 2020, equations 16 to 20, with φ(x) = elu(x) + 1 of equation 7."""
    q, k, v = (projected(x, p, name) for name in ("query", "key", "value"))
    q, k = feature_map(q), feature_map(k)
    return out(by_head(lambda q, k, v: papers.linear_attention(q, k, v, normalized), v.shape[1], q, k, v), p)


def kimi_delta_attention(x, p, *, negative=False):
    """Kimi Team 2025, section 4: α per feature and a sigmoid gate, both from low-rank projections."""
    q, k, v = short(x, p)
    beta = sigmoid(projected(x, p, "b")) * (2 if negative else 1)
    rate = softplus(projected(projected(x, p, "decay_down"), p, "decay_up"))
    z = by_head(papers.kda, v.shape[1], q, k, v, np.exp(-np.exp(p["A_log"])[:, None] * rate), beta)
    z = rms(z, p["norm/scale"])
    return out(z * sigmoid(projected(projected(x, p, "gate_down"), p, "gate_up")) if "gate_up/kernel" in p else z, p)


def gated_delta_product(x, p, *, steps, negative=True):
    """Siems et al. 2025, section 3: H_i = A(x_i) H_{i−1} + B(x_i), n_h keys, values and β per token."""
    q, k, v = short(x, p)
    beta = sigmoid(projected(x, p, "b")) * (2 if negative else 1)
    k, v, beta = (y.reshape(len(x), -1, steps, *y.shape[2:]) for y in (k, v, beta))
    alpha = np.exp(-np.exp(p["A_log"]) * softplus(projected(x, p, "a") + p["dt_bias"]))
    z = rms(by_head(papers.gated_delta_product, v.shape[1], q, k, v, alpha, beta), p["norm/scale"])
    return out(z * silu(projected(x, p, "gate")) if "gate/kernel" in p else z, p)


def rwkv7(x, p, *, first=None):
    """Peng et al. 2025, section 4, in the order of its equations; `first` are the values of the first layer."""
    shifted = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    mixed = {c: x + (shifted - x) * p[f"x_{c}"] for c in "rwkvag"}

    def lora(c, name, activation=lambda y: y):
        return projected(activation(projected(mixed[c], p, f"{name}_down")), p, f"{name}_up")

    r, k, v = (projected(mixed[c], p, name) for c, name in zip("rkv", ("query", "key", "value")))
    if first is not None:
        v = v + (first - v) * sigmoid(lora("v", "v"))
    a, g = sigmoid(lora("a", "a")), lora("g", "gate", sigmoid)
    w = np.exp(-np.exp(-0.5) * sigmoid(lora("w", "decay", np.tanh)))
    kappa = k * p["k_k"]
    kappa = kappa / np.sqrt((kappa**2).sum(axis=-1, keepdims=True) + 1e-6)
    k = k * (1 + (a - 1) * p["k_a"])
    y = by_head(papers.rwkv7, v.shape[1], r, k, v, w, kappa, a)
    y = (y - y.mean(axis=-1, keepdims=True)) / np.sqrt(y.var(axis=-1, keepdims=True) + y.shape[-1] * 1e-5)
    u = (r * k * p["r_k"]).sum(axis=-1, keepdims=True) * v
    return out((y * p["norm/scale"] + p["norm/bias"] + u) * g, p)


def hgrn2(x, p, *, layer=0, layers=3):
    """Qin et al. 2024, section 3: f = γ + (1 − γ) σ(x W_f), the query is the output gate, then a norm over heads."""
    below = layer * np.exp(p["lower_bound"]) if layer else 0.0
    bound = below / (below + layers - layer)
    o, f, i = silu(projected(x, p, "query")), sigmoid(projected(x, p, "key")), projected(x, p, "value")
    z = by_head(papers.hgrn2, i.shape[1], i, bound + (1 - bound) * f, o)
    return out(rms(z.reshape(len(x), -1), p["norm/scale"]).reshape(z.shape), p)
