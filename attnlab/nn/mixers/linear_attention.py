"""Linear attention."""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from attnlab.nn import projections
from attnlab.nn.layer import LayerOut
from attnlab.nn.mixers.interface import MixerState, RecurrentConfig, RecurrentMixer
from attnlab.ops.linear import elu_plus_one, quotient


class LinearAttention(RecurrentMixer):
    """Causal multi-head linear attention (Katharopoulos et al. 2020), whose state does not grow with the length.

    Its cache holds states `[B, H, D', D + 1]` in float32, where the feature map has D' features. The last column is the
    sum of the keys, which normalizes the outputs.

    Attributes: as in `RecurrentMixer` without `value_dim`, plus
      features: width of the output; None for the input's width.
      feature_map, normalize: see `attnlab.linear_attention`; `feature_map` None for `elu_plus_one`.
      use_bias: whether the projections add a bias.

    >>> block = Block(LinearAttention(num_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    value_dim: ClassVar[None] = None
    features: int | None = None
    feature_map: Callable | None = None
    normalize: bool = True
    use_bias: bool = True

    def mix(self, x, state, context):
        size, feature_map = self.key_features(x.shape[-1]), self.feature_map or elu_plus_one
        names = ("query", "key", "value")
        q, k, v = (self._dense(name, self.num_heads, size, use_bias=self.use_bias)(x) for name in names)
        q, k, v = (y.astype(jnp.promote_types(y.dtype, jnp.float32)) for y in (q, k, v))  # the type of the sums
        z, last_state = self._recur(feature_map(q), feature_map(k), v, state, context, scale=1.0)
        z = z.astype(self.dtype or x.dtype)
        out = projections.out(self, z, self.features or x.shape[-1], use_bias=self.use_bias)
        return LayerOut(out, MixerState(last_state))

    def _recurrence(self, q, k, v, **options):
        v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)  # a last value of 1 sums the keys
        z, state = super()._recurrence(q, k, v, **options)
        return quotient(z[..., :-1], z[..., -1:]) if self.normalize else z[..., :-1], state

    def init_state(self, batch, features):
        size = self.key_features(features)
        mapped = jax.eval_shape(self.feature_map or elu_plus_one, jax.ShapeDtypeStruct((size,), jnp.float32))
        return MixerState(jnp.zeros((batch, self.num_heads, *mapped.shape, size + 1), self._wide))


class LinearConfig(RecurrentConfig, of=LinearAttention, kind="linear"):
    """Linear attention."""

    value_dim: ClassVar[None] = None

    def shared(self, model):
        return super().shared(model) | {"use_bias": model.use_bias}
