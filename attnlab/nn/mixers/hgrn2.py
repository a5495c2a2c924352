"""HGRN2."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attnlab.nn.layer import LayerOut
from attnlab.nn.mixers.interface import MixerState, RecurrentConfig, RecurrentMixer
from attnlab.nn.norms import RMSNorm
from attnlab.support.options import option


class HGRN2(RecurrentMixer):
    """HGRN2 (Qin et al. 2024, arXiv 2404.07904, section 3): a feature of the state takes in as much as it forgets.

    With the forget gate f = b + (1 − b) · σ(x W), where W is `key/kernel`, keys are 1 − f and decays are f. The output
    of `linear_recurrence(silu(q), 1 − f, v, log f, scale=1)` is normalized over all heads together and projected.

    In the paper, the lower bounds b grow from layer to layer by a softmax over all layers. Here, layer l of L has
    b = l·e^γ / (l·e^γ + L − l), learned through γ = `lower_bound` `[H, K]`. b starts at l / L, as in the paper, and is
    always 0 in the first layer. Layers share no parameters, so they can be stacked or used alone.

    Its cache holds states `[B, H, K, V]` in float32.

    Attributes: as in `RecurrentMixer`, plus
      layers: L, the number of layers of the model; None for b = 0 and no `lower_bound`.

    >>> block = Block(HGRN2(num_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    layers: int | None = None
    norm_epsilon: float = option("ε of the output norm", 1e-5, low=1e-30, high=1)

    def mix(self, x, state, context):
        keys, values = self.key_features(x.shape[-1]), self.value_features(x.shape[-1])
        wide = jnp.promote_types(x.dtype, jnp.float32)
        q = jax.nn.silu(self._dense("query", self.num_heads, keys)(x))
        v = self._dense("value", self.num_heads, values)(x)
        forget = self._dense("key", self.num_heads, keys)(x).astype(wide)
        bound = self._bound(keys, context.layer).astype(wide) if self.layers is not None else 0
        k = (1 - bound) * jax.nn.sigmoid(-forget)  # 1 − f, without cancellation
        f = bound + (1 - bound) * jax.nn.sigmoid(forget)
        g = jnp.log(jnp.maximum(f, jnp.finfo(wide).tiny))
        z, last_state = self._recur(q, k.astype(v.dtype), v, state, context, g=g, scale=1.0)
        joint = z.reshape(*z.shape[:-2], self.num_heads * values)
        normed = RMSNorm(self.norm_epsilon, dtype=self.dtype, name="norm")(joint).reshape(z.shape)
        return LayerOut(self._out(normed, x.shape[-1]), MixerState(last_state))

    def _bound(self, keys, layer):
        """The lower bounds b, `[H, K]`."""
        below = layer * jnp.exp(self.param("lower_bound", nn.initializers.zeros, (self.num_heads, keys)))
        return below / (below + self.layers - layer)


class HGRN2Config(RecurrentConfig, of=HGRN2, kind="hgrn2"):
    """HGRN2."""

    def shared(self, model):
        return super().shared(model) | {"layers": model.num_layers}
