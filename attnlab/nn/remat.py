"""The values of a block that are stored for the gradient (Chen et al. 2016)."""

from attnlab.nn import sharding

# Stored: everything; the block's input; input, matrix products, attention's output; input and attention's output.
REMAT = ("none", "block", "dots", "attention")


def remat_policy(remat: str, *, gathers: bool, loop: bool):
    """Return (whether a block needs `jax.checkpoint`, its policy).

    `gathers` is whether the block gathers its parameters, `loop` whether it runs in a loop over layers. Without a loop,
    XLA by itself recomputes elementwise functions between products. In a loop it cannot, so "none" then means "dots".
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
    """Whether a primitive is a product with weights, without batch axes; products of two activations have them."""
    if primitive.name == "dot_general":
        return params["dimension_numbers"][1] == ((), ())
    return primitive.name == "matrix_product"


def _is_attention(primitive, params) -> bool:
    """Whether a primitive gives a residual of the attention operator: an array named "attention", or cuDNN's output."""
    return (primitive.name == "name" and params["name"] == "attention") or primitive.name.startswith(
        "dot_product_attention_fwd"
    )
