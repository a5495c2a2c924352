"""The groups of options of a model, each a dataclass; in `config.model` a mapping."""

import dataclasses

from attnlab.nn.rotations import Rotary
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


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of layers of latent attention; for None as in DeepSeek-AI 2024 (arXiv 2405.04434), section 3.1.2.

    >>> from attnlab.nn import GPT
    >>> GPT(10, 1, 2, 8, 6, mixer="latent", latent=Latent(kv_rank=4)).latent.kv_rank
    4
    """

    kv_rank: int | None = option("features of the latent of keys and values; None for 4·width / num_heads", None, low=1)
    q_rank: int | None = option("features of the latent of queries; None for queries without a latent", None, low=1)
    nope_dim: int | None = option("features of a key without rotary position; None for width / num_heads", None, low=1)
    rope_dim: int | None = option("rotated features of a key, shared by all heads; None for half nope_dim", None, low=2)
    value_dim: int | None = option("features of a value; None for nope_dim", None, low=1)


GROUPS = {"rotary": Rotary, "recurrence": Recurrence, "latent": Latent}


def group(model, name: str):
    """The options of a group of a `GPT`, or of `config.model`."""
    value = getattr(model, name)
    return value if isinstance(value, GROUPS[name]) else GROUPS[name](**dict(value))
