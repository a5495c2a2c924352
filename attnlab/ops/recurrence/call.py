"""A call of the recurrence, as its backends take it.

A backend is a module with `run`; `reason_against(call)`, which returns why it cannot run a call, or None; and
`untried(call)`, which returns why "auto" leaves a call to other backends, or None. Code that has not run on its target
hardware runs only when `impl` names it.
"""

from typing import NamedTuple

from attnlab.ops.context import ShardedCall
from attnlab.ops.recurrence.terms import Terms
from attnlab.types import DType


class RecurrenceCall(NamedTuple):
    """The arrays of a call and where it runs.

    Attributes:
      terms: the arrays with heads repeated and q scaled, in float32 or wider.
      operand: the type of q, k and v.
      split: how `context_parallel` splits the sequence; None if it does not.
      platform: "cpu", "gpu" or "tpu".
    """

    terms: Terms
    operand: DType
    split: ShardedCall | None
    platform: str

    @property
    def length(self) -> int:
        """The number of tokens, T."""
        return self.terms.v.shape[-3]
