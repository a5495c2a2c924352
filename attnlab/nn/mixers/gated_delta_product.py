"""Gated DeltaProduct."""

import jax.numpy as jnp

from attnlab.nn.layer import LayerOut
from attnlab.nn.mixers.delta_rule import DeltaRule
from attnlab.nn.mixers.interface import MixerState, RecurrentConfig
from attnlab.support.options import option


class GatedDeltaProduct(DeltaRule):
    """Gated DeltaProduct (Siems et al. 2025, arXiv 2502.10297, section 3): several steps of the delta rule per token.

    A token has one query and one decay, and a key, a value and a β for each of n steps. The state decays before the
    first step and is read after the last, so a token applies a product of n Householder matrices, which can rotate
    and permute. Projections, convolutions, norm and gate are as in `GatedDeltaNet`. `linear_recurrence` runs over the
    n · T steps. The pattern of `attnlab.see` has T queries and n · T keys; the n steps of a token are consecutive.

    Its cache holds states `[B, HV, K, V]` in float32 and the last W − 1 inputs of the convolutions.

    Attributes: as in `GatedDeltaNet` without `decay`, plus

    >>> block = Block(GatedDeltaProduct(num_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    steps: int = option(
        "delta-rule steps per token, n; head h has keys, values and β number h·n to h·n + n − 1", 2, low=1
    )
    negative_eigenvalues: bool = option("allow β up to 2, which state tracking in the paper needs", True)

    def mix(self, x, state, context):
        q, k, v, conv = self._projected(x, state, context)
        beta = self._beta(x, self.states * self.steps)
        k, v, beta = (self._in_turn(y) for y in (k, v, beta))
        z, last_state = self._recur(q, k, v, state, context, g=self._decay(x), beta=beta)
        return LayerOut(self._out(self._gated(x, z), x.shape[-1]), MixerState(last_state, conv))

    def _recurrence(self, q, k, v, *, g, segment_ids, lengths, **options):
        steps, (batch, length, heads) = self.steps, g.shape
        first = jnp.pad(g[:, :, None], ((0, 0), (0, 0), (0, steps - 1), (0, 0)))  # the other steps do not decay
        options["g"] = first.reshape(batch, length * steps, heads)
        options["segment_ids"] = None if segment_ids is None else jnp.repeat(segment_ids, steps, axis=1)
        options["lengths"] = None if lengths is None else lengths * steps
        z, state = super()._recurrence(jnp.repeat(q, steps, axis=1), k, v, **options)
        return z[:, steps - 1 :: steps], state

    def _in_turn(self, y):
        """Reshape `[B, T, heads · n, …]` to `[B, T · n, heads, …]`."""
        batch, length, heads = y.shape[0], y.shape[1], y.shape[2] // self.steps
        y = jnp.moveaxis(y.reshape(batch, length, heads, self.steps, *y.shape[3:]), 3, 2)
        return y.reshape(batch, length * self.steps, heads, *y.shape[4:])

    def _sizes(self, features):
        query, *others = super()._sizes(features).items()
        return dict([query, *((name, (heads * self.steps, size)) for name, (heads, size) in others)])

    def init_state(self, batch, features):
        if self.steps < 1:
            raise ValueError(f"steps = {self.steps}: expected 1 or more steps of the delta rule")
        return super().init_state(batch, features)


class DeltaProductConfig(RecurrentConfig, of=GatedDeltaProduct, kind="delta_product"):
    """Gated DeltaProduct."""
