"""Gated DeltaNet, and DeltaNet, which is it without a decay."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from attnlab.nn.mixers import gates
from attnlab.nn.mixers.interface import RecurrentMixer
from attnlab.nn.mixers.short_conv import ShortConv
from attnlab.nn.norms import RMSNorm


class GatedDeltaNet(RecurrentMixer):
    """Gated DeltaNet (Yang et al. 2025, arXiv 2412.06464): a state that decays, and forgets what a key is to replace.

    Queries, keys and values pass a short convolution and silu; queries and keys have unit norm. With
    g = −exp(A_log) · softplus(a(x) + dt_bias) and β = σ(b(x)), `linear_recurrence(q, k, v, g, β)` is normalized for
    each head, multiplied by silu of a gate, and projected. Without `decay` and `gate` it is DeltaNet (Yang et al. 2024,
    arXiv 2406.06484).

    Its cache holds states `[B, HV, K, V]` in float32 and the last W − 1 inputs of the convolutions.

    Attributes:
      num_heads: H, heads of queries and keys.
      key_dim: K; None for input width / H.
      value_dim: V; None for input width / H.
      value_heads: HV, a multiple of H; None for H.
      conv: W, tokens of the convolution; 0 for none.
      decay: whether the state decays.
      gate: whether there is an output gate.
      negative_eigenvalues: β up to 2, so that a state can change its sign, and count modulo 2 (Grazzi et al. 2025).
      norm_epsilon: ε of the norm of the outputs.
      kernel_init, out_kernel_init: initializers; `out_kernel_init` None for `kernel_init`.
      dtype: type of the computation; the input's when None. Decays and states are float32.

    >>> block = Block(GatedDeltaNet(num_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    value_heads: int | None = None
    conv: int = 4
    decay: bool = True
    gate: bool = True
    negative_eigenvalues: bool = False
    norm_epsilon: float = 1e-5

    state_operations: ClassVar[int] = 8  # an erasure is a read and a write
    reads: ClassVar[frozenset[str]] = frozenset(
        ("heads", "key_dim", "value_dim", "value_heads", "conv", "gate", "negative_eigenvalues", "norm_epsilon")
    )

    @property
    def states(self):
        return self.value_heads or self.num_heads

    def _mix(self, x, before, tokens):
        sizes = {"query": self.num_heads, "key": self.num_heads, "value": self.states}
        found = {}
        for name, heads in sizes.items():
            of_head = self.value_features if name == "value" else self.key_features
            found[name] = self._dense(name, heads, of_head(x.shape[-1]))(x)
        conv = None
        if self.conv:
            convolved = {}
            for name, y in found.items():
                layer = ShortConv(self.conv, dtype=self.dtype, name=f"{name}_conv")
                convolved[name] = layer(y, before.conv[name], tokens.segments, tokens.lengths)
            found, conv = ({name: pair[n] for name, pair in convolved.items()} for n in (0, 1))
        q, k, v = (jax.nn.silu(found[name]) for name in sizes)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        q, k = (gates.unit(y.astype(wide)).astype(v.dtype) for y in (q, k))
        beta = jax.nn.sigmoid(self._dense("b", self.states, dtype=wide)(x)) * (2 if self.negative_eigenvalues else 1)
        g = None
        if self.decay:
            a_log = self.param("A_log", gates.a_log(0.01, 16.0), (self.states,))
            dt_bias = self.param("dt_bias", gates.dt_bias, (self.states,))
            g = -jnp.exp(a_log.astype(wide)) * jax.nn.softplus(self._dense("a", self.states, dtype=wide)(x) + dt_bias)

        def after(z):
            z = RMSNorm(self.norm_epsilon, dtype=self.dtype, name="norm")(z)
            return z * jax.nn.silu(self._dense("gate", *z.shape[-2:])(x)) if self.gate else z

        z, state = self._recur(q, k, v, before.state, tokens, g=g, beta=beta, after=after)
        return self._out(z, x.shape[-1]), state, conv

    def _empty(self, batch, features):
        if self.states % self.num_heads:
            raise ValueError(f"value_heads = {self.states} is not a multiple of num_heads = {self.num_heads}")
        state, _ = super()._empty(batch, features)
        if not self.conv:
            return state, None
        key, value = (self.num_heads, self.key_features(features)), (self.states, self.value_features(features))
        shapes = {"query": key, "key": key, "value": value}
        dtype = self.dtype or jnp.float32
        return state, {name: jnp.zeros((batch, self.conv - 1, *shape), dtype) for name, shape in shapes.items()}
