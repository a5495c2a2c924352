"""The transformer block: attention and a feed-forward layer around a residual stream."""

from typing import Any

import flax.linen as nn
from jaxtyping import Float

from attnlab.nn import sharding
from attnlab.nn.layer import Context, Layer, LayerOut
from attnlab.nn.norms import make_norm
from attnlab.ops import dropout
from attnlab.types import Array, DType

NORM_EPSILON = 1e-5  # GPT-2's
NORM_AT = ("before", "after", "both")


class Block(Layer):
    """Transformer block: x + attention(norm(x)), then x + mlp(norm(x)) (Radford et al. 2019, section 2.3).

    Attributes:
      attention: the layer that mixes tokens; a `Layer`, e.g. `MultiHeadAttention` or `GRU`.
      mlp: the feed-forward layer; None for attention alone (Elhage et al. 2021).
      dropout_rate: probability of dropping an element of either layer's output.
      use_bias: whether the norms add a bias.
      norm_first: False for the post-norm of Vaswani et al. 2017: norm(x + attention(x)), then norm(x + mlp(x)).
      norm_epsilon: ε of the norms.
      norm: "layer", "rms" or "rms_plus_one", see `make_norm`.
      norm_at: "before" a layer; "after" it, x + norm(attention(x)) (OLMo Team 2024, section 3.2); or "both" (Gemma
        Team 2024). Norms after a layer are named `attention_post_norm` and `mlp_post_norm`.
      dtype: type of the computation; the input's when None.

    >>> block = Block(MultiHeadAttention(num_heads=2, mask=Causal()), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    attention: Layer
    mlp: nn.Module | None = None
    dropout_rate: float = 0.0
    use_bias: bool = True
    norm_first: bool = True
    norm_epsilon: float = NORM_EPSILON
    dtype: DType | None = None
    norm: str = "layer"
    norm_at: str = "before"

    @property
    def value_residual(self) -> bool:
        """Whether the layer that mixes tokens has one."""
        return self.attention.value_residual

    @property
    def drops(self) -> bool:
        return bool(self.dropout_rate) or self.attention.drops

    def init_cache(self, batch: int, features: int, capacity: int = 0) -> Any:
        """The cache of the layer that mixes tokens."""
        return self.attention.init_cache(batch, features, capacity)

    @nn.compact
    def forward(self, x: Float[Array, "B T F"], context: Context, cache: Any = None) -> LayerOut:
        """The residual stream after both layers; ValueError also for an unknown `norm` or `norm_at`."""
        if self.norm_at not in NORM_AT:
            raise ValueError(f"norm_at = {self.norm_at!r}: expected one of {', '.join(NORM_AT)}")
        if not self.norm_first and self.norm_at != "before":
            raise ValueError(
                f"norm_first = False norms the residual stream, so norm_at = {self.norm_at!r} has no place"
            )
        before, after = (self.norm_first and self.norm_at != other for other in ("after", "before"))
        key = context.dropout_key

        def norm(x, name):
            options = {"use_bias": self.use_bias, "dtype": self.dtype, "name": name}
            return make_norm(self.norm, self.norm_epsilon, **options)(x)

        def drop(x, site):
            if key is None or not self.dropout_rate:
                return x
            return dropout.dropout(x, dropout.fold_in(dropout.per_example(key, x.shape[:1]), site), self.dropout_rate)

        def residual(x, out, name, site):
            """Add the layer's output to the residual stream."""
            out = norm(out, f"{name}_post_norm") if after else out
            x = sharding.constrain(x + drop(out, site), "batch", "length", None)
            return x if self.norm_first else norm(x, f"{name}_norm")

        def normed(x, name):
            return norm(x, f"{name}_norm") if before else x

        inputs = normed(x, "attention")
        inner = context._replace(dropout_key=None if key is None else dropout.fold_in(key, 0))
        mixed = self.attention.forward(inputs, inner, cache)
        x = residual(x, mixed.out, "attention", 1)
        if self.mlp is not None:
            x = residual(x, self.mlp(normed(x, "mlp")), "mlp", 2)
        return mixed._replace(out=x)
