"""The options of layers that carry a state from token to token."""

import dataclasses

from attnlab.support.options import option


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """Sizes and parts of recurrent mixers; each kind of layer reads some of them, and has its defaults for None.

    >>> from attnlab.nn import GPT
    >>> GPT(10, 1, 2, 8, 6, recurrence=Recurrence(heads=4)).recurrence.heads
    4
    """

    heads: int | None = option("heads of keys; None for num_heads", None, low=1)
    key_dim: int | None = option("features of a key; None for the mixer's default", None, low=1)
    value_dim: int | None = option("features of a value; None for the mixer's default", None, low=1)
    conv: int | None = option("tokens of the short convolution, 0 for none; None for the mixer's default", None, low=0)
    gate: bool | None = option("multiply outputs by a gate; None for the mixer's default", None)
    negative_eigenvalues: bool | None = option(
        "β of the delta rule up to 2 (Grazzi et al. 2025), not 1; None for the mixer's default", None
    )
    value_heads: int | None = option("heads of values, a multiple of heads; None for heads", None, low=1)
    steps: int | None = option("delta steps a token of delta_product; None for the mixer's default", None, low=1)
    norm_epsilon: float | None = option("ε of the norm of the outputs; None for 1e-5", None, low=1e-30, high=1)
