"""The values of a block that are stored for the gradient (Chen et al. 2016)."""

from attnlab.nn import sharding

# What each stores: everything; the block's input; input and matrix products; input and the operator's output.
REMAT = ("none", "block", "dots", "attention")


def remat_policy(remat: str, *, gathers: bool, loop: bool):
    """(Whether `jax.checkpoint` is needed, its policy), for a block that `gathers` parameters, or layers in a `loop`.

    Without a loop, XLA recomputes the elementwise functions between products by itself. Across the iterations of a loop
    it cannot, so "none" is treated as "dots" there.
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
    """Whether a primitive is a product with weights; products of scores and values have batch axes."""
    if primitive.name == "dot_general":
        return params["dimension_numbers"][1] == ((), ())
    return primitive.name == "matrix_product"


def _is_attention(primitive, params) -> bool:
    """Whether a primitive gives a residual of the attention operator: an array named "attention", or cuDNN's output."""
    return (primitive.name == "name" and params["name"] == "attention") or primitive.name.startswith(
        "dot_product_attention_fwd"
    )
