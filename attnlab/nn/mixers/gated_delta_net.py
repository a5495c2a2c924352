"""Gated DeltaNet, and DeltaNet: the same layer without decay and, by default, without an output gate."""

from attnlab.nn.layer import LayerOut
from attnlab.nn.mixers.delta_rule import DeltaRule
from attnlab.nn.mixers.interface import MixerState, RecurrentConfig


class GatedDeltaNet(DeltaRule):
    """Gated DeltaNet (Yang et al. 2025, arXiv 2412.06464): a decaying state that replaces the old value of a key.

    Queries, keys and values pass through a short convolution and silu; queries and keys have unit norm. With
    g = −exp(A_log) · softplus(a(x) + dt_bias) and β = σ(b(x)), `linear_recurrence(q, k, v, g, β)` is normalized for
    each head, multiplied by silu of a gate, and projected. Without `decay` and `gate` it is DeltaNet (Yang et al. 2024,
    arXiv 2406.06484).

    Its cache holds states `[B, HV, K, V]` in float32 and the last W − 1 inputs of the convolutions.

    Attributes: as in `RecurrentMixer`, plus
      value_heads: HV, a multiple of H; None for H.
      conv: W, kernel size of the convolution in tokens; 0 for none.
      decay: whether the state decays.
      gate: whether there is an output gate.
      negative_eigenvalues: let β reach 2, so that a state can change sign and count modulo 2 (Grazzi et al. 2025).
      norm_epsilon: ε of the output norm.

    >>> block = Block(GatedDeltaNet(num_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    decay: bool = True

    def mix(self, x, state, context):
        q, k, v, conv = self._projected(x, state, context)
        beta = self._beta(x, self.states)
        g = self._decay(x) if self.decay else None

        z, last_state = self._recur(q, k, v, state, context, g=g, beta=beta)
        return LayerOut(self._out(self._gated(x, z), x.shape[-1]), MixerState(last_state, conv))


class GatedDeltaConfig(RecurrentConfig, of=GatedDeltaNet, kind="gated_delta"):
    """Gated DeltaNet."""


class DeltaConfig(GatedDeltaConfig, kind="delta"):
    """DeltaNet."""

    gate: bool = False

    def shared(self, model):
        return super().shared(model) | {"decay": False}
