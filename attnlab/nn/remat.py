"""What of a block is stored for the gradient (Chen et al. 2016)."""

from attnlab.nn import sharding

# Everything; the block's input; that and its matrix products; its input and the attention operator's output.
REMAT = ("none", "block", "dots", "attention")


def remat_policy(remat: str, *, gathers: bool, loop: bool):
    """(whether `jax.checkpoint` is needed, its policy).

    Without a loop, XLA may recompute the elementwise functions between products by itself. Across the iterations of a
    loop it cannot, so "none" is treated as "dots" there.

    Args:
      remat: one of `REMAT`.
      gathers: whether the block gathers its parameters, which are then gathered again for the gradient.
      loop: whether the layers are a loop.
    """
    remat = "dots" if loop and remat == "none" else remat

    def saves(primitive, *_, **params):
        if sharding.is_gather(primitive):
            return False
        if remat == "dots":
            return _is_product(primitive, params) or _is_attention(primitive, params)
        return remat == "none" or (remat == "attention" and _is_attention(primitive, params))

    return remat != "none" or gathers, saves


def _is_product(primitive, params) -> bool:
    """A product with weights: products of scores and values have batch axes."""
    if primitive.name == "dot_general":
        return params["dimension_numbers"][1] == ((), ())
    return primitive.name == "matrix_product"


def _is_attention(primitive, params) -> bool:
    """Residuals of the attention operator: arrays named "attention", and the outputs of cuDNN's primitives."""
    return (primitive.name == "name" and params["name"] == "attention") or primitive.name.startswith(
        "dot_product_attention_fwd"
    )
