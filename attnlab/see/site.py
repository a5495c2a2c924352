"""Sites: where a model attends, and what can be read and edited there."""

import dataclasses
import re
from collections.abc import Iterator

from attnlab.nn import taps


@dataclasses.dataclass(frozen=True)
class Site:
    """One attention layer of a model, for given inputs.

    Attributes:
      path: of the layer, e.g. "block_0/attention"; one that is called several times has "@1", "@2", … from its second
        call on, and one of the layers of `nn.scan` or `nn.vmap` has "[0]", "[1]", ….
      kind: the layer's type, e.g. "MultiHeadAttention".
      heads: H, of queries.
      kv_heads: Hk, of keys and values.
      q_length, kv_length: Tq and Tk.
      names: of its values, among q, k, v, pattern and z.
      editable: whether its values can be edited.
      mismatch: the largest difference between pattern·v and z, over the largest element of z; None if not measured.
      tolerance: above which the pattern is not that of z.

    >>> Site("attention", "MultiHeadAttention", 2, 2, 5, 5, mismatch=1e-7, tolerance=3e-4).verified
    True
    """

    path: str
    kind: str
    heads: int
    kv_heads: int
    q_length: int
    kv_length: int
    names: tuple[str, ...] = taps.ATTENTION
    editable: bool = True
    mismatch: float | None = None
    tolerance: float = 0.0

    @property
    def verified(self) -> bool:
        """Whether the pattern was seen to be the one that z is computed with."""
        return self.mismatch is not None and self.mismatch <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Sites:
    """The attention layers of a model and its blocks, in the order in which they are computed.

    Attributes:
      attention: the attention layers; iterating over `Sites` gives them.
      blocks: paths of the layers that take and return the residual stream, whose values are `in` and `out`.
      norms: paths of the norms outside of blocks, whose value `norm` is what they divide by, `[..., T, 1]`.

    >>> print(Sites((Site("attention", "MultiHeadAttention", 2, 2, 5, 5),)))
    path       kind                heads  queries  keys  pattern·v = z
    attention  MultiHeadAttention  2      5        5     not measured
    """

    attention: tuple[Site, ...]
    blocks: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Site]:
        return iter(self.attention)

    def __len__(self) -> int:
        return len(self.attention)

    def __getitem__(self, index: int) -> Site:
        return self.attention[index]

    @property
    def order(self) -> tuple[str, ...]:
        """All paths: attention layers, blocks, norms."""
        return (*(site.path for site in self), *self.blocks, *self.norms)

    def values(self) -> dict[str, tuple[str, ...]]:
        """The names of the values at each path that `edited` takes."""
        found = {site.path: site.names for site in self if site.editable}
        return found | dict.fromkeys(self.blocks, taps.STREAMS) | dict.fromkeys(self.norms, (taps.NORM,))

    def block_of(self, path: str) -> str | None:
        """The block that a site is in, or is; None if there is none."""
        return next((block for block in self.blocks if f"{path}/".startswith(f"{block}/")), None)

    def __str__(self) -> str:
        rows = [("path", "kind", "heads", "queries", "keys", "pattern·v = z")]
        for site in self:
            grouped = "" if site.heads == site.kv_heads else f" ({site.kv_heads} of keys)"
            apart = "not measured" if site.mismatch is None else f"differs by {site.mismatch:.1e}"
            found = f"yes, {apart}" if site.verified else apart if site.mismatch is None else f"NO, {apart}"
            lengths = (str(site.q_length), str(site.kv_length))
            rows.append((site.path or "(the model)", site.kind, f"{site.heads}{grouped}", *lengths, found))
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def natural(path: str) -> list:
    """A key that sorts paths by the numbers in them.

    >>> sorted(["h_10", "h_9"], key=natural)
    ['h_9', 'h_10']
    """
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]


def blocks_of(attention: tuple[str, ...], streams: dict[str, bool]) -> tuple[str, ...]:
    """The blocks that the attention layers are in.

    A block takes and returns the residual stream. It is the innermost of the modules around an attention layer that
    does, or one around that which holds no further attention layer.

    Args:
      attention: paths of the attention layers.
      streams: whether what each module takes and returns has one shape, by path, in the order of the computation.

    >>> blocks_of(("h/0/attn", "h/1/attn"), {"": False, "h": True, "h/0": True, "h/0/attn": True, "h/1": True})
    ('h/0', 'h/1')
    """

    def around(path):
        parts = path.split("/")
        return ["/".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]

    def held(path):
        return sum(one.startswith(f"{path}/") for one in attention)

    found = set()
    for path in attention:
        candidates = [outer for outer in around(path) if streams.get(outer)]
        if candidates:
            inner = candidates[0]
            found.add([outer for outer in candidates if held(outer) == held(inner)][-1])
    return tuple(path for path in streams if path in found)
