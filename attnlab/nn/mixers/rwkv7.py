"""RWKV-7."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attnlab.nn.layer import LayerOut
from attnlab.nn.mixers import gates
from attnlab.nn.mixers.interface import MixerState, RecurrentConfig, RecurrentMixer, last
from attnlab.ops.cpu import pointwise
from attnlab.types import Array, DType

# Exponents for the initial share of the previous token in each input; see `_Start.shift`.
_SHIFTS = {"x_r": 0.2, "x_w": 0.9, "x_k": 0.7, "x_v": 0.7, "x_a": 0.9, "x_g": 0.2}


class RWKV7(RecurrentMixer):
    """The time mixing of RWKV-7 (Peng et al. 2025, arXiv 2503.14456, section 4); it erases and writes different keys.

    Each of six inputs x_r, x_w, x_k, x_v, x_a and x_g is a weighted mean of a token and the previous token, with a
    learned weight for each feature. The query r, key k and value v are linear in x_r, x_k and x_v. With low-rank
    matrices W, A, V and G, and with w0, a0 and v0 the biases of `decay_up`, `a_up` and `v_up`,

        g = −e^(−1/2) · σ(w0 + tanh(x_w W₁) W₂)    a = σ(a0 + x_a A₁ A₂)    v ← v + (v₁ − v) · σ(v0 + x_v V₁ V₂)
        κ = unit(k ⊙ k_k)    k ← k ⊙ (1 + (a − 1) ⊙ k_a)    gate = σ(x_g G₁) G₂

    where v₁ are the values of the first layer. `linear_recurrence(r, k, v, g, erase=(a ⊙ κ, κ ⊙ exp(−g)), scale=1)` is
    standardized for each head, with ε = V · 1e-5, scale and bias. Then (r · (k ⊙ r_k)) v is added, and the sum is
    multiplied by the gate and projected. unit(x) is x / √(Σx² + 1e-6), as in `GatedDeltaNet`.

    Its cache holds states `[B, H, K, V]` in float32 and the last input, `[B, 1, F]`.

    Attributes: as in `RecurrentMixer`, plus
      value_residual: mix the values with v₁ and return them, as layers of `GPT` do.
      layers: L, the model's layers; initial vectors depend on L and the layer's number, as in the authors' code.
      kernel_init, out_kernel_init: initializers of full-rank matrices; low-rank products start at 0 or, for the gate,
        small. `out_kernel_init` None for `kernel_init`.

    >>> block = Block(RWKV7(num_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    value_residual: bool = False
    layers: int = 1

    def mix(self, x, state, context):
        wide, features = jnp.promote_types(x.dtype, jnp.float32), x.shape[-1]
        key, value = (self.num_heads, self.key_features(features)), (self.num_heads, self.value_features(features))
        ranks, start = _ranks(features), _Start(context.layer, self.layers, key[1])
        inputs, last_input = self._shifted(x, state.conv, context, start)
        r = self._dense("query", *key)(inputs["x_r"])
        k = self._dense("key", *key)(inputs["x_k"])
        v = self._dense("value", *value)(inputs["x_v"])
        w = self._low("decay", inputs["x_w"], ranks.decay, key, start.decay, jnp.tanh, dtype=wide)
        a = jax.nn.sigmoid(self._low("a", inputs["x_a"], ranks.a, key, start.rate, dtype=wide))
        if self.value_residual:  # the first layer has the parameters as well, so that layers can be stacked
            share = jax.nn.sigmoid(self._low("v", inputs["x_v"], ranks.v, value, start.share)).astype(v.dtype)
            v = v if context.first_values is None else v + share * (context.first_values - v)
        vectors = {"k_k": start.removal, "k_a": nn.initializers.constant(1.02), "r_k": nn.initializers.constant(-0.04)}
        k_k, k_a, r_k = (self.param(name, init, key).astype(wide) for name, init in vectors.items())
        kappa = gates.unit(k.astype(wide) * k_k)
        k = (k * (1 + (a - 1) * k_a)).astype(v.dtype)
        g = -np.exp(-0.5) * jax.nn.sigmoid(w)
        erase = (a * kappa, kappa * jnp.exp(-g))
        z, last_state = self._recur(r, k, v, state, context, g=g, erase=erase, scale=1.0)
        z = _HeadNorm(1e-5 * value[1], start.scale, dtype=self.dtype, name="norm")(z)
        z = z + (r.astype(wide) * k * r_k).sum(axis=-1, keepdims=True).astype(v.dtype) * v
        low = self._dense("gate_down", ranks.gate, kernel_init=nn.initializers.zeros)(inputs["x_g"])
        z = z * self._dense("gate_up", *value, kernel_init=_small)(jax.nn.sigmoid(low))
        return LayerOut(self._out(z, features), MixerState(last_state, last_input), v if self.value_residual else None)

    def _shifted(self, x, before, context, start):
        """(By name, the six means of each token and the token before it in its segment; the last input)."""
        x = x.astype(self.dtype or x.dtype)
        inputs = jnp.concatenate([before.astype(x.dtype), x], axis=1)
        previous = inputs[:, :-1]
        if context.segments is not None:
            same = jnp.pad(context.segments[:, 1:] == context.segments[:, :-1], ((0, 0), (1, 0)))
            previous = jnp.where(same[..., None], previous, 0)
        means = {}
        for name, power in _SHIFTS.items():
            share = self.param(name, start.shift(power), x.shape[-1:]).astype(x.dtype)
            means[name] = x + share * (previous - x)
        return means, last(inputs, 1, context.lengths).astype(before.dtype)

    def _low(self, name, x, rank, size, bias_init, activation=None, dtype=None):
        """A low-rank linear layer with a bias; initially its output is the bias alone."""
        low = self._dense(f"{name}_down", rank, kernel_init=nn.initializers.zeros, dtype=dtype)(x)
        low = low if activation is None else activation(low)
        options = {"use_bias": True, "kernel_init": _small, "bias_init": bias_init, "dtype": dtype}
        return self._dense(f"{name}_up", *size, **options)(low)

    def init_state(self, batch, features):
        last_input = jnp.zeros((batch, 1, features), self.dtype or jnp.float32)
        return super().init_state(batch, features)._replace(conv=last_input)


class RWKV7Config(RecurrentConfig, of=RWKV7, kind="rwkv7"):
    """RWKV-7."""

    def shared(self, model):
        return super().shared(model) | {"value_residual": True, "layers": model.num_layers}


class _HeadNorm(nn.Module):
    """Standardization of `[…, H, V]` over V, with a scale and a bias `[H, V]`; the scale starts at `initial`."""

    epsilon: float
    initial: Array | float
    dtype: DType | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*B H V"]) -> Float[Array, "*B H V"]:
        scale = self.param("scale", lambda key, shape: jnp.full(shape, self.initial), x.shape[-2:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-2:])
        return (pointwise.standardize(x, self.epsilon) * scale + bias).astype(self.dtype or x.dtype)


class _Ranks(NamedTuple):
    decay: int
    a: int
    v: int
    gate: int


def _ranks(features: int) -> _Ranks:
    """Ranks for an input width, as in the authors' code: multiples of 32 near a multiple of the width's square root."""
    return _Ranks(*(max(32, 32 * round(factor * features**0.5 / 32)) for factor in (2.5, 2.5, 1.7, 5.0)))


class _Start:
    """Initializers of vectors, as in the authors' code.

    They depend on the layer's number, and on the feature's index among all features and within its head of `size`.
    """

    def __init__(self, layer, layers: int, size: int):
        self._depth, self._left = layer / max(1, layers - 1), 1 - layer / layers
        self._size, self.scale = size, ((1 + layer) / layers) ** 0.7

    def shift(self, power: float):
        return self._by_feature(lambda n, count: 1 - (n / count) ** (power * self._left))

    @property
    def decay(self):
        def init(n, count):
            return -5.5 + 6 * _share(n, count) ** (1 + self._depth**0.3) + 2.5 * self._zigzag(n)

        return self._by_feature(init)

    @property
    def rate(self):
        return self._by_feature(lambda n, count: -0.19 + 0.3 * self._zigzag(n) + 0.4 * (_share(n, count) - 0.5))

    @property
    def share(self):
        return self._by_feature(lambda n, count: 0.73 - 0.4 * (_share(n, count) - 0.5))

    @property
    def removal(self):
        return self._by_feature(lambda n, count: 0.71 - 0.1 * (_share(n, count) - 0.5))

    def _zigzag(self, n):
        """Rise from −1 to 1 over a head, flat in its middle."""
        at = 2 * _share(n % self._size, self._size) - 1
        return at * abs(at)

    @staticmethod
    def _by_feature(function):
        def init(key, shape, dtype=jnp.float32):
            count = int(np.prod(shape))
            return jnp.asarray(function(np.arange(count), count), dtype).reshape(shape)

        return init


def _share(n, count: int):
    return n / max(1, count - 1)


def _small(key, shape, dtype=jnp.float32):
    """Orthogonal rows or columns of length 0.1 · √(inputs / outputs), or 0.1 if there are fewer inputs than outputs."""
    return nn.initializers.orthogonal(0.1 * max(1, shape[0] / shape[1]) ** 0.5)(key, shape, dtype)
