"""The options of latent attention."""

import dataclasses

from attnlab.support.options import option


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
