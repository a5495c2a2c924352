"""One attention head, and heads side by side: the modules to learn from."""

import flax.linen as nn
from jaxtyping import Float

from attnlab.ops.attention import attention, attention_weights
from attnlab.ops.masks import Causal, Mask, join
from attnlab.types import Array, DType


class Head(nn.Module):
    """One head of self-attention: softmax(x W_q (x W_k)ᵀ / √head_dim) x W_v, causal unless told otherwise.

    The scale is the head's own width, as in the paper, not that of the input (Vaswani et al. 2017, section 3.2.1).

    Attributes:
      head_dim: D, width of queries, keys and values.
      use_bias: whether the three projections add a bias.
      mask: who may look at whom; None for everybody.
      score_mod, impl: see `attnlab.attention`.
      dropout_rate: probability that an attention weight drops.
      kernel_init: initialiser of `query/kernel`, `key/kernel` and `value/kernel`, each `[F, D]`.
      dtype: type of the computation; the input's when None.

    Under `capture_intermediates` or `mutable=["intermediates"]` the weights `[..., T, T]` are sown as
    `attention_weights`.

    >>> head = Head(head_dim=4)
    >>> x = jnp.ones((2, 5, 8))  # [batch, length, features]
    >>> params = head.init(jax.random.key(0), x)
    >>> jax.jit(head.apply)(params, x).shape
    (2, 5, 4)
    """

    head_dim: int
    use_bias: bool = False
    mask: Mask | None = Causal()
    score_mod: object = None
    dropout_rate: float = 0.0
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    dtype: DType | None = None
    impl: str = "auto"

    @nn.compact
    def __call__(
        self, x: Float[Array, "*B T F"], *, mask: Mask | None = None, deterministic: bool = True
    ) -> Float[Array, "*B T D"]:
        """Attends within each sequence of `x` `[..., T, F]`.

        Args:
          x: `[..., T, F]`.
          mask: and-ed with the field; the place for masks that hold arrays.
          deterministic: False drops weights, with the `dropout` rng.

        Returns:
          `[..., T, head_dim]`.

        Raises:
          ValueError: what `attnlab.attention` raises, e.g. for a mask that does not fit.
          flax.errors.InvalidRngError: weights drop, but there is no `dropout` rng.
        """

        def project(name):
            dense = nn.Dense(self.head_dim, self.use_bias, self.dtype, kernel_init=self.kernel_init, name=name)
            return dense(x)[..., None, :]

        q, k, v = project("query"), project("key"), project("value")
        terms = {"mask": join(self.mask, mask), "score_mod": self.score_mod}
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "attention_weights", attention_weights(q, k, **terms)[..., 0, :, :])
        if self.dropout_rate and not deterministic:
            terms |= {"dropout_rate": self.dropout_rate, "dropout_key": self.make_rng("dropout")}
        return attention(q, k, v, impl=self.impl, **terms)[..., 0, :]


class StackedHeads(nn.Module):
    """`num_heads` heads side by side, each with its own projections, their outputs concatenated.

    Every head projects the full input; nothing is cut into chunks. Parameters are those of `Head` with a leading
    axis for the head: `heads/query/kernel` `[H, F, D]`.

    Attributes:
      num_heads: H.
      head_dim, use_bias, mask, score_mod, dropout_rate, kernel_init, dtype, impl: those of each `Head`.

    >>> heads = StackedHeads(num_heads=3, head_dim=4)
    >>> heads.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 12)
    """

    num_heads: int
    head_dim: int
    use_bias: bool = False
    mask: Mask | None = Causal()
    score_mod: object = None
    dropout_rate: float = 0.0
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    dtype: DType | None = None
    impl: str = "auto"

    @nn.compact
    def __call__(
        self, x: Float[Array, "*B T F"], *, mask: Mask | None = None, deterministic: bool = True
    ) -> Float[Array, "*B T HD"]:
        """Attends with every head; arguments and errors are those of `Head`.

        Returns:
          `[..., T, num_heads · head_dim]`, head 0 first.
        """
        head = Head(
            self.head_dim,
            self.use_bias,
            self.mask,
            self.score_mod,
            self.dropout_rate,
            self.kernel_init,
            self.dtype,
            self.impl,
            name="heads",
        )
        side_by_side = nn.vmap(
            lambda head, x, mask: head(x, mask=mask, deterministic=deterministic),
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=None,
            out_axes=-2,
            axis_size=self.num_heads,
        )
        out = side_by_side(head, x, mask)  # [B, T, H, D]
        return out.reshape(*out.shape[:-2], self.num_heads * self.head_dim)
