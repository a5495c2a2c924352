"""The arguments of a kernel: arrays, and the static plan that goes with them."""

import math
from typing import NamedTuple

from attnlab.ops.schedule import Visits
from attnlab.types import Array

LOG2E = math.log2(math.e)


class Terms(NamedTuple):
    """A program, or the arrays that it takes, for each of the three functions of a tile; or None."""

    logits: object  # bias and score mods, of the raw logits
    visible: object  # the mask
    keeps: object  # which weights dropout keeps


class Plan(NamedTuple):
    lengths: tuple[int, int]  # Tq, Tk
    block_sizes: tuple[int, int]  # queries and keys of a tile
    tile_kinds: tuple[int, ...]  # PARTIAL and FULL, if they occur among the tiles; both when these are traced
    dropout_rate: float
    programs: Terms
    factor: float  # of the products of q and k; they are then logits, of base 2 without a program
    rotates_rows: bool  # whether the hardware rotates each row of a tile by another number of lanes

    @property
    def unit(self) -> float:
        """Kernel logits per natural logit: 1 where a program computes natural logits, log2(e) otherwise."""
        return LOG2E if self.programs.logits is None else 1.0

    @property
    def derivative(self) -> float:
        return self.factor / self.unit

    def learned(self, *varies: str) -> list[int]:
        inputs = () if self.programs.logits is None else self.programs.logits.inputs
        return [at for at, x in enumerate(inputs) if x.is_learned and x.varies in varies]


class Others(NamedTuple):
    """Arrays besides q, k, v: `[*batch or 1s, H or 1, …]`, in the calls of kernels `[B or 1, H or 1, …]`."""

    sinks: Array | None  # `[..., H]`, in logits, float32
    terms: Terms  # tuples of arrays, see `splitting.Split`
    by_query: Visits  # visits, one block of queries after another, `[..., H, N]`
    by_key: Visits  # visits, one block of keys after another, `[..., Hk, N]`
    of_pairs: Array | None  # words of all tiles, `[..., H, nQ·nK]`, where pairs have gradients
    drawn: Array | None  # index of each drawn tile, `[..., H, nQ, nK]`, where the mask is drawn


class Operands(NamedTuple):
    """q `[B, H, Tq, D]`, k `[B, Hk, Tk, D]`, v `[B, Hk, Tk, Dv]`, and the others."""

    q: Array
    k: Array
    v: Array
    others: Others


class Cotangents(NamedTuple):
    d_out: Array  # [B, H, Tq, Dv]
    shift: Array  # [B, H, Tq], the max, in the kernel's logits
    log_sum: Array  # [B, H, Tq], likewise; +inf for fully masked rows, so that e^(logit − shift − log_sum) is 0
    delta: Array  # [B, H, Tq], Σ_d out·d_out − d_lse
