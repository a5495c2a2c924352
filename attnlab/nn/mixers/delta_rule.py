"""The parts that mixers of the delta rule share."""

import jax
import jax.numpy as jnp

from attnlab.nn.mixers import gates
from attnlab.nn.mixers.interface import RecurrentMixer
from attnlab.nn.mixers.short_conv import convolve, inputs_before
from attnlab.nn.norms import RMSNorm
from attnlab.support.options import option


class DeltaRule(RecurrentMixer):
    """Base class of mixers with a short convolution, silu and, for queries and keys, unit norm before the delta rule.

    Cache and attributes are the same as in `GatedDeltaNet`.
    """

    value_heads: int | None = option("value heads, a multiple of heads; None for heads", None, low=1)
    conv: int = option("kernel size of the short convolution in tokens; 0 for none", 4, low=0)
    gate: bool = option("multiply outputs by a gate", True)
    negative_eigenvalues: bool = option("allow β of the delta rule up to 2, not 1 (Grazzi et al. 2025)", False)
    norm_epsilon: float = option("ε of the output norm", 1e-5, low=1e-30, high=1)

    @property
    def states(self):
        return self.value_heads or self.num_heads

    def _sizes(self, features) -> dict[str, tuple[int, int]]:
        """Heads and features of each projection."""
        key, value = self.key_features(features), self.value_features(features)
        return {"query": (self.num_heads, key), "key": (self.num_heads, key), "value": (self.states, value)}

    def _projected(self, x, state, context):
        """(Queries, keys, values, the last inputs of the convolutions or None)."""
        projections = {name: self._dense(name, *size)(x) for name, size in self._sizes(x.shape[-1]).items()}
        projections, conv = convolve(projections, self.conv, state.conv, context, self.dtype)
        q, k, v = map(jax.nn.silu, projections.values())
        q, k = (gates.unit(y.astype(_wide(x))).astype(v.dtype) for y in (q, k))
        return q, k, v, conv

    def _beta(self, x, heads):
        """β = σ(b(x)), or 2·σ(b(x)) with `negative_eigenvalues`, `[B, T, heads]`."""
        return (2 if self.negative_eigenvalues else 1) * jax.nn.sigmoid(self._dense("b", heads, dtype=_wide(x))(x))

    def _decay(self, x):
        """g = −exp(A_log) · softplus(a(x) + dt_bias), `[B, T, HV]`."""
        a_log = self.param("A_log", gates.a_log(0.01, 16.0), (self.states,)).astype(_wide(x))
        dt_bias = self.param("dt_bias", gates.dt_bias, (self.states,))
        return -jnp.exp(a_log) * jax.nn.softplus(self._dense("a", self.states, dtype=_wide(x))(x) + dt_bias)

    def _normed(self, z):
        return RMSNorm(self.norm_epsilon, dtype=self.dtype, name="norm")(z)

    def _gated(self, x, z):
        """Normalize the recurrence's output z and, if there is a gate, multiply it by silu(gate(x))."""
        z = self._normed(z)
        return z * jax.nn.silu(self._dense("gate", *z.shape[-2:])(x)) if self.gate else z

    def init_state(self, batch, features):
        conv = inputs_before(self._sizes(features), self.conv, batch, self.dtype or jnp.float32)
        return super().init_state(batch, features)._replace(conv=conv)


def _wide(x):
    return jnp.promote_types(x.dtype, jnp.float32)
