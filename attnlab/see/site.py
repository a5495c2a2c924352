"""Sites: the attention layers of a model, and the values that can be read and edited there."""

import dataclasses
from collections.abc import Iterator

from attnlab.nn import taps


@dataclasses.dataclass(frozen=True)
class Site:
    """One attention layer of a model, for inputs of particular shapes.

    Attributes:
      path: e.g. "block_0/attention"; the suffixes "@1", "@2", … mark further calls of one layer, and "[0]", "[1]", …
        the layers of `nn.scan` or `nn.vmap`.
      kind: the layer's type, e.g. "MultiHeadAttention".
      heads, kv_heads: H, the number of query heads, and Hk, the number of key and value heads.
      q_length, kv_length: Tq and Tk.
      names: the values that can be captured, among q, k, v, pattern and z.
      editable: whether these values can be edited.
      mismatch: max |z − pattern·v| / max |pattern·v|, for z before any output gate and norm; None if not measured.
      tolerance: the largest mismatch at which a pattern counts as verified.

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
        """Whether a check has shown that z is computed with the pattern."""
        return self.mismatch is not None and self.mismatch <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Sites:
    """A model's attention layers, blocks and norms, each in the order of the computation.

    Attributes:
      attention: the attention layers; iterating over `Sites` yields them.
      blocks: paths of the layers that take and return the residual stream; their values are `in` and `out`.
      norms: paths of the norms outside of blocks; their value `norm` is the divisor `[..., T, 1]`.
      others: path and kind of the layers that mix tokens without a pattern, such as `GRU`.

    >>> print(Sites((Site("attention", "MultiHeadAttention", 2, 2, 5, 5),)))
    path       kind                heads  queries  keys  pattern·v = z
    attention  MultiHeadAttention  2      5        5     not measured
    """

    attention: tuple[Site, ...]
    blocks: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()

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
        """The names of the editable values at each path."""
        editable = {site.path: site.names for site in self if site.editable}
        return editable | dict.fromkeys(self.blocks, taps.STREAMS) | dict.fromkeys(self.norms, (taps.NORM,))

    def block_of(self, path: str) -> str | None:
        """The block that is the layer at `path` or contains it; None if there is none."""
        return next((block for block in self.blocks if f"{path}/".startswith(f"{block}/")), None)

    def __str__(self) -> str:
        rows = [("path", "kind", "heads", "queries", "keys", "pattern·v = z")]
        for site in self:
            grouped = "" if site.heads == site.kv_heads else f" ({site.kv_heads} of keys)"
            verdict = "not measured"
            if site.mismatch is not None:
                verdict = f"{'yes, within' if site.verified else 'NO, differs by'} {site.mismatch:.1e}"
            lengths = (str(site.q_length), str(site.kv_length))
            rows.append((site.path or "(the model)", site.kind, f"{site.heads}{grouped}", *lengths, verdict))
        rows += [(path, kind, "", "", "", "has no pattern") for path, kind in self.others]
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def blocks_of(attention: tuple[str, ...], streams: dict[str, bool]) -> tuple[str, ...]:
    """The blocks of the attention layers; `streams`, in call order, says which modules return the shape they take.

    A layer's block is the outermost of these modules around it that has no more attention layers than the innermost.
    """

    def around(path):
        parts = path.split("/")
        return ["/".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]

    def held(path):
        return sum(layer.startswith(f"{path}/") for layer in attention)

    blocks = set()
    for path in attention:
        candidates = [outer for outer in around(path) if streams.get(outer)]
        if candidates:
            inner = candidates[0]
            blocks.add([outer for outer in candidates if held(outer) == held(inner)][-1])
    return tuple(path for path in streams if path in blocks)
