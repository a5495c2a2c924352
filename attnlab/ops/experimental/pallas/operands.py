"""The arguments of a kernel: arrays, and the static plan that goes with them."""

import math
from typing import NamedTuple

from attnlab.ops.schedule import Visits
from attnlab.types import Array

LOG2E = math.log2(math.e)


class Terms(NamedTuple):
    """Something for each of the three functions of a tile, or None: programs, or the arrays that these take.

    Attributes:
      logits: bias and score mods, of the raw logits.
      visible: the mask.
      keeps: which weights dropout keeps.
    """

    logits: object
    visible: object
    keeps: object


class Plan(NamedTuple):
    """The static part of a call.

    Attributes:
      lengths: Tq and Tk.
      block_sizes: queries and keys of a tile.
      tile_kinds: the values, PARTIAL and FULL, that occur among the tiles; both when these are traced.
      dropout_rate: probability that a weight is dropped.
      programs: what a kernel computes of each term.
      factor: what products of q and k are multiplied by; they are then logits, of base 2 without a program.
      rotates_rows: whether the hardware rotates each row of a tile by another number of lanes.
    """

    lengths: tuple[int, int]
    block_sizes: tuple[int, int]
    tile_kinds: tuple[int, ...]
    dropout_rate: float
    programs: Terms
    factor: float
    rotates_rows: bool

    @property
    def unit(self) -> float:
        """Kernel logits per natural logit: 1 where a program computes natural logits, log2(e) otherwise."""
        return LOG2E if self.programs.logits is None else 1.0

    @property
    def derivative(self) -> float:
        """Of natural logits by the products of q and k."""
        return self.factor / self.unit

    def learned(self, *varies: str) -> list[int]:
        """The inputs of logits that have gradients and vary with one of `varies`."""
        inputs = () if self.programs.logits is None else self.programs.logits.inputs
        return [at for at, x in enumerate(inputs) if x.is_learned and x.varies in varies]


class Others(NamedTuple):
    """The arrays of a call besides q, k, v: `[*batch or 1s, H or 1, …]`, in the calls of kernels `[B or 1, H or 1, …]`.

    Attributes:
      sinks: `[..., H]` or None, in logits, float32.
      terms: tuples of arrays, see `splitting.Split`.
      by_query: the visits, one block of queries after another, `[..., H, N]`.
      by_key: the visits, one block of keys after another, `[..., Hk, N]`.
      of_pairs: words of all tiles, `[..., H, nQ·nK]`, where pairs have gradients.
      drawn: which of the drawn tiles each tile is, `[..., H, nQ, nK]`, where the mask is drawn.
    """

    sinks: Array | None
    terms: Terms
    by_query: Visits
    by_key: Visits
    of_pairs: Array | None
    drawn: Array | None


class Operands(NamedTuple):
    """q `[B, H, Tq, D]`, k `[B, Hk, Tk, D]`, v `[B, Hk, Tk, Dv]`, and the others."""

    q: Array
    k: Array
    v: Array
    others: Others


class Cotangents(NamedTuple):
    """The arrays of a backward kernel besides `Operands`.

    Attributes:
      d_out: `[B, H, Tq, Dv]`.
      shift: `[B, H, Tq]`, the max, in the kernel's logits.
      log_sum: `[B, H, Tq]`, likewise; +inf for fully masked rows, so that weights, e^(logit − shift − log_sum), are 0.
      delta: `[B, H, Tq]`, Σ_d out·d_out − d_lse.
    """

    d_out: Array
    shift: Array
    log_sum: Array
    delta: Array
