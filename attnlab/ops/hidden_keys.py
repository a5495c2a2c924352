"""Zero keys that no query may attend to, for kernels that multiply whole tiles of keys and values."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from attnlab.ops.call import AttentionCall
from attnlab.ops.mask_algebra import And, Mask, Or
from attnlab.ops.masks import Causal, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.types import Array

_ROWS = 128  # minimum queries per block in the search for visible keys


def zeroed(call: AttentionCall) -> tuple[Array, Array]:
    """Return k and v with zeros for keys that no query may attend to, because NaN times 0 is NaN."""
    if call.mask is None or (_attend_to_themselves(call.mask) and call.is_aligned):
        return call.k, call.v
    q_length, kv_length = call.lengths
    mask = call.mask if _is_exact(call.mask, call.is_aligned) else _Evaluated(call.mask)
    visible = mask.tiles(q_length, kv_length, (max(_ROWS, -(-q_length // 64)), 1), **call.coordinates)[0]
    visible = visible.any(-2)  # [..., H or 1, Tk]
    if isinstance(visible, np.ndarray) and visible.all():
        return call.k, call.v
    if visible.shape[-2] > 1:
        visible = visible.reshape(*visible.shape[:-2], call.k.shape[-2], -1, kv_length).any(-2)
    visible = jnp.asarray(visible).swapaxes(-1, -2)[..., None]
    visible = visible if call.batch else visible[0]
    return jnp.where(visible, call.k, 0), jnp.where(visible, call.v, 0)


@dataclasses.dataclass(frozen=True)
class _Evaluated(Mask):
    """A mask without its bounds, so that `Mask.bounds` evaluates it at all pairs."""

    mask: Mask

    def visible(self, tile):
        return self.mask.visible(tile)

    def for_tiles(self, *lengths):
        return _Evaluated(self.mask.for_tiles(*lengths))


def _is_exact(mask: Mask, is_aligned: bool) -> bool:
    """Whether the bounds of a tile of queries and one key say exactly whether any of the queries attends to the key."""
    match mask:
        case Padding() | Causal():
            return True
        case SlidingWindow() | PrefixLM():
            return is_aligned
        case And(a, b):
            is_by_key = isinstance(a, Padding) or isinstance(b, Padding)
            return is_by_key and _is_exact(a, is_aligned) and _is_exact(b, is_aligned)
    return False


def _attend_to_themselves(mask: Mask) -> bool:
    """Whether every token is known to attend to itself."""
    match mask:
        case Causal() | SlidingWindow() | PrefixLM() | Segments(kv_ids=None):
            return True
        case And(a, b):
            return _attend_to_themselves(a) and _attend_to_themselves(b)
        case Or(a, b):
            return _attend_to_themselves(a) or _attend_to_themselves(b)
    return False
