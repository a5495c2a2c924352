"""A single attention head and a stack of them: the simplest modules, written to be read."""

import functools

import flax.linen as nn
from jaxtyping import Float

from attnlab.nn import checks, taps
from attnlab.ops.attention import attention, attention_weights
from attnlab.ops.masks import Causal, join
from attnlab.types import Array, DType


class Head(checks.MaskedModule):
    """One head of self-attention: softmax(x W_q (x W_k)ᵀ / √head_dim) x W_v, causal by default.

    The scale uses the head's width, not the input's, as in the paper (Vaswani et al. 2017, section 3.2.1).

    Attributes:
      head_dim: D, width of queries, keys and values.
      use_bias: whether the three projections add a bias.
      mask: which keys each query may attend to; None for all of them. A bool array counts as `masks.Dense`.
      score_mod, impl: see `attnlab.attention`.
      dropout_rate: probability of dropping an attention weight.
      kernel_init: initializer of `query/kernel`, `key/kernel` and `value/kernel`, each `[F, D]`.
      dtype: type of the computation; None for the input's type.

    With `capture_intermediates` or `mutable=["intermediates"]` the weights `[..., T, T]` are sown as
    `attention_weights`.

    >>> head = Head(head_dim=4)
    >>> x = jnp.ones((2, 5, 8))  # [batch, length, features]
    >>> params = head.init(jax.random.key(0), x)
    >>> jax.jit(head.apply)(params, x).shape
    (2, 5, 4)
    """

    head_dim: int
    use_bias: bool = False
    mask: checks.MaskLike | None = Causal()
    score_mod: object = None
    dropout_rate: float = 0.0
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    dtype: DType | None = None
    impl: str = "auto"

    @checks.compact
    def __call__(
        self, x: Float[Array, "*B T F"], *, mask: checks.MaskLike | None = None, deterministic: bool = True
    ) -> Float[Array, "*B T D"]:
        """Attend within each sequence of `x`.

        Args:
          x: `[..., T, F]`.
          mask: and-ed with the field `mask`; pass masks with traced arrays here.
          deterministic: False to drop attention weights, with the `dropout` rng.

        Returns:
          `[..., T, head_dim]`.

        Raises:
          ValueError: any error of `attnlab.attention`, e.g. for a mask of another shape.
          flax.errors.InvalidRngError: dropout is on, but there is no `dropout` rng.
        """

        def project(name):
            dense = nn.Dense(self.head_dim, self.use_bias, self.dtype, kernel_init=self.kernel_init, name=name)
            return dense(x)[..., None, :]

        projections = (("q", "query"), ("k", "key"), ("v", "value"))
        q, k, v = (taps.tap(self, name, project(projection)) for name, projection in projections)
        terms = {"mask": join(self.mask, mask), "score_mod": self.score_mod}
        weights = functools.partial(attention_weights, q, k, **terms)
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "attention_weights", weights()[..., 0, :, :])
        drops = bool(self.dropout_rate) and not deterministic
        if drops:
            terms |= {"dropout_rate": self.dropout_rate, "dropout_key": self.make_rng("dropout")}
        z = attention(q, k, v, impl=self.impl, **terms)
        z = taps.attended(self, z, lambda rows: weights(rows=rows), v, drops=drops)
        return taps.tap(self, "z", z)[..., 0, :]


class StackedHeads(checks.MaskedModule):
    """`num_heads` heads in parallel, each with its own projections; their outputs are concatenated.

    Each head projects the full input, not a slice of its features. Parameters are named as in `Head`, under `heads`,
    and have a leading axis of heads: `heads/query/kernel` `[H, F, D]`.

    Attributes:
      num_heads: H.
      head_dim, use_bias, mask, score_mod, dropout_rate, kernel_init, dtype, impl: fields of each `Head`.

    >>> heads = StackedHeads(num_heads=3, head_dim=4)
    >>> heads.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 12)
    """

    num_heads: int
    head_dim: int
    use_bias: bool = False
    mask: checks.MaskLike | None = Causal()
    score_mod: object = None
    dropout_rate: float = 0.0
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    dtype: DType | None = None
    impl: str = "auto"

    @checks.compact
    def __call__(
        self, x: Float[Array, "*B T F"], *, mask: checks.MaskLike | None = None, deterministic: bool = True
    ) -> Float[Array, "*B T HD"]:
        """Attend with each head; arguments and errors as for `Head`.

        Returns:
          `[..., T, num_heads · head_dim]`, head 0 first.
        """
        names = ("head_dim", "use_bias", "mask", "score_mod", "dropout_rate", "kernel_init", "dtype", "impl")
        head = Head(**{name: getattr(self, name) for name in names}, name="heads")
        side_by_side = nn.vmap(
            lambda head, x, mask: head(x, mask=mask, deterministic=deterministic),
            variable_axes={"params": 0, "intermediates": 0, **dict.fromkeys(taps.COLLECTIONS, 0)},
            split_rngs={"params": True, "dropout": True},
            in_axes=None,
            out_axes=-2,
            axis_size=self.num_heads,
        )
        out = side_by_side(head, x, mask)  # [B, T, H, D]
        return out.reshape(*out.shape[:-2], self.num_heads * self.head_dim)
