"""Build the text of a page's HTML file, and write the file."""

import base64
import dataclasses
import html
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import attnlab
from attnlab.see.pages import encoding
from attnlab.see.pages.contents import Contents, contents
from attnlab.see.results import Effects, Run
from attnlab.support import documents
from attnlab.support.extras import require
from attnlab.support.paths import write_text

FOLDER = Path(__file__).parent
GENERATOR = '<meta name="generator" content="attnlab'
PICTURE_BYTES = 150_000
IFRAME_HEIGHT = 900  # pixels


@dataclasses.dataclass(frozen=True, repr=False)
class Page:
    """A page that shows attention: a file, or the output of a notebook cell.

    Attributes:
      html: the whole document.
      png: a picture of all heads at the last checkpoint.
      path: the file; None if there is none.

    >>> Page("<!doctype html>", b"")
    Page(15 bytes, not in a file)
    """

    html: str
    png: bytes
    path: Path | None = None

    def __repr__(self) -> str:
        return f"Page({len(self.html.encode()):,} bytes, {'not in a file' if self.path is None else f'in {self.path}'})"

    def __fspath__(self) -> str:
        if self.path is None:
            raise ValueError("the page is not in a file: pass path= to page")
        return str(self.path)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        """Output for notebooks: the page in a frame of fixed height that may only run scripts, and the picture."""
        frame = (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" title="Attention by head" '
            f'width="100%" height="{IFRAME_HEIGHT}" frameborder="0"></iframe>'
        )
        return {"text/html": frame, "image/png": base64.b64encode(self.png).decode(), "text/plain": repr(self)}


def page(
    runs: Run | Mapping[Any, Run],
    tokens: Sequence,
    path: str | os.PathLike | None = None,
    *,
    title: str = "",
    scores: Any = None,
    effects: Effects | Mapping | None = None,
    max_bytes: int = 4 << 20,
) -> Page:
    """Build one HTML file that shows attention: all heads, one head, its tokens, and how they change in training.

    The file is self-contained and loads nothing. Without JavaScript it shows a picture of all heads. Weights are stored
    to within 0.004; if a prompt has more than 256 keys, all rows are stored as their eight largest weights.

    Args:
      runs: a run with patterns `[B, H, Tq, Tk]`, or several by training step, e.g. `{0: run, 500: run}`.
      tokens: the tokens of one prompt, or a list of such lists, one for each example of the batch. If queries and keys
        differ, pass a tuple (queries, keys) in place of each list. Weights beyond a prompt's tokens are cut off.
      path: path of the file; None for a notebook. An existing file is overwritten only if attnlab wrote it.
      title: the finding, or the model's name.
      scores: numbers `[L, H]` by kind, or an object with such `values`; if `runs` is by step, a mapping by step.
      effects: effects of the heads, over layer and head; if `runs` is by step, a mapping by step.
      max_bytes: largest size of the file.

    Returns:
      The page, for `open` or a notebook.

    Raises:
      ValueError: the arguments do not fit one another, the page would be larger than `max_bytes`, or `path` is a file
        that attnlab did not write.

    >>> pattern = np.tri(3)[None, None] / np.arange(1, 4)[:, None]
    >>> run = Run(None, {"pattern": {"block_0/attention": pattern}}, ("block_0/attention",))
    >>> page(run, ["el", "gato", "duerme"], title="Uniform causal attention").html[:15]
    '<!doctype html>'
    """
    shown = contents(runs, tokens, scores, effects)
    title = documents.valid_unicode(title or "Attention by head")
    png = _picture(shown)
    text = _document(shown, title, png)
    size = len(text.encode())
    if size > max_bytes:
        prompts, steps, layers = len(shown.prompts), len(shown.steps), len(shown.paths)
        length = max(len(prompt.queries) for prompt in shown.prompts)
        of = f"{prompts} prompts × {steps} checkpoints × {layers} layers × {max(shown.heads)} heads × {length} tokens"
        remedies = "give fewer prompts, fewer checkpoints, or a larger max_bytes"
        raise ValueError(f"the page of {of} has {size:,} bytes, more than max_bytes={max_bytes:,}: {remedies}")
    if path is not None:
        _write(text, Path(path))
    return Page(text, png, None if path is None else Path(path))


def _document(shown: Contents, title: str, png: bytes) -> str:
    about = _about(shown)
    parts = {
        "title": html.escape(title),
        "version": attnlab.__version__,
        "about": html.escape(about),
        "alt": html.escape(
            f"{title}. Attention weights as heat maps, one row per layer, one column per head: {about}."
        ),
        "png": base64.b64encode(png).decode(),
        "data": encoding.script_json(_data(shown)),
    }
    return documents.document(FOLDER, parts)


def _about(shown: Contents) -> str:
    longest = max(shown.prompts, key=lambda prompt: len(prompt.keys))
    counts = [(len(shown.paths), "layer"), (sum(shown.heads), "head"), (len(longest.keys), "token")]
    counts += [
        (count, name) for count, name in ((len(shown.prompts), "prompt"), (len(shown.steps), "checkpoint")) if count > 1
    ]
    return ", ".join(f"{count:,} {name}{'s' * (count != 1)}" for count, name in counts)


def _data(shown: Contents) -> dict:
    causal = all(encoding.is_causal(prompt.weights) for prompt in shown.prompts)
    kept = max(len(prompt.keys) for prompt in shown.prompts) > encoding.LONGEST_DENSE
    return {
        "steps": shown.steps,
        "layers": [{"path": path, "heads": heads} for path, heads in zip(shown.paths, shown.heads)],
        "prompts": [
            {"queries": prompt.queries, "keys": None if prompt.keys == prompt.queries else prompt.keys}
            for prompt in shown.prompts
        ],
        "causal": causal,
        "kept": encoding.KEPT if kept else 0,
        "tables": {name: _numbers(table) for name, table in shown.tables.items()},
        "streams": [encoding.stream(encoding.record(prompt.weights, causal, kept)) for prompt in shown.prompts],
    }


def _numbers(table: np.ndarray | np.floating) -> list | float | None:
    """Nested lists of numbers to five significant digits, None for NaN and infinity."""
    if table.ndim:
        return [_numbers(row) for row in table]
    return float(f"{table:.5g}") if np.isfinite(table) else None


def _picture(shown: Contents) -> bytes:
    """All heads on the first prompt at the last checkpoint: a PNG of at most `PICTURE_BYTES`."""
    require("matplotlib.pyplot", "plots", "the picture in a page")
    from PIL import Image  # comes with matplotlib

    from attnlab import plots

    last = shown.prompts[0].weights[-1]
    layers = np.split(last, np.cumsum(shown.heads)[:-1])
    # The page's title is not drawn: it may have $ and characters that matplotlib's font lacks.
    figure = plots.atlas(layers, _about(shown), causal=encoding.is_causal(last))
    for dpi in (110, 80, 55, 40):
        drawn, packed = io.BytesIO(), io.BytesIO()
        figure.savefig(drawn, format="png", dpi=dpi)
        # A palette image takes a third of the bytes.
        colors = Image.open(drawn).convert("RGB").quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        colors.save(packed, "png", optimize=True)
        if len(packed.getvalue()) <= PICTURE_BYTES:
            break
    return packed.getvalue()


def _write(text: str, path: Path) -> None:
    """Write the file atomically."""
    if path.exists() and not is_page(path):
        raise ValueError(f"{path} exists and is not an attnlab page: choose another path, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def is_page(path: Path) -> bool:
    """Whether attnlab wrote the file."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return GENERATOR in file.read(4096)
