"""One offline HTML page of results: the answer in sentences, a table, curves, and what they are of."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from attnlab.comparing import charts
from attnlab.comparing.charts import Chart
from attnlab.support import documents, paths
from attnlab.support.errors import UserError

FOLDER = Path(__file__).parent
NAME = "comparison.html"
COLORS = 12  # in page.css; later variants repeat them
VERDICTS = {  # classes in page.css
    "better": "better",
    "worse": "worse",
    "failed": "worse",
    "not told apart": "open",
    "reproduced": "better",
    "not reproduced": "worse",
    "same sign only": "open",
    "underpowered": "open",
    "not trained far enough": "open",
}


class Table(NamedTuple):
    """A table to sort: texts, header first, whose first column has the variants; and the values of these cells."""

    cells: Sequence[Sequence[str]]
    keys: Sequence[Sequence[float | str | None]]  # without the header; None sorts last


class Run(NamedTuple):
    """A run: its variant, its seed, learning rate, loss, … by name, and its config's fields that are no defaults."""

    name: str
    variant: str
    values: Mapping[str, float]
    fields: Mapping[str, object]


class Section(NamedTuple):
    """One task, or the text.

    Attributes:
      title: of the section.
      sentences: the answer.
      table: the columns that it is about.
      notes: sentences below the table.
      charts: the figures.
      columns: all columns, folded; None for none.
      runs: all runs that the table is made of, folded.
    """

    title: str
    sentences: Sequence[str]
    table: Table
    notes: Sequence[str]
    charts: Sequence[Chart] = ()
    columns: Table | None = None
    runs: Sequence[Run] = ()


def write(folder: Path, title: str, about: Mapping[str, str], sections: Sequence[Section]) -> Path:
    """Write `comparison.html` into the folder, whole or not at all, and return its path; `about` says what it is of."""
    path = folder / NAME
    links = "".join(f'<li><a href="#s{n}">{_name(section.title)}</a></li>' for n, section in enumerate(sections))
    parts = {
        "title": escape(title),
        "about": "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in about.items()),
        "navigation": f'<nav aria-label="Sections"><ul>{links}</ul></nav>' if len(sections) > 1 else "",
        "sections": "\n".join(_section(f"s{n}", section, _looks(sections)) for n, section in enumerate(sections)),
    }
    paths.write_text(path, documents.valid_unicode(documents.document(FOLDER, parts)))
    return path


def fragment(section: Section) -> str:
    """The answer and the table of a section, for a notebook."""
    body = "".join(f"<p>{escape(sentence)}</p>" for sentence in section.sentences)
    heads, *rows = section.table.cells
    table = "".join(f"<th>{escape(head)}</th>" for head in heads)
    table += "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<h4>{escape(section.title)}</h4>{body}<table>{table}</table>"


def _looks(sections: Sequence[Section]) -> dict[str, str]:
    """The class of each variant's colour, the same in all sections."""
    names = dict.fromkeys(row[0] for section in sections for row in section.table.cells[1:])
    return {name: f"c{at % COLORS}" for at, name in enumerate(names)}


def _section(anchor: str, section: Section, looks: Mapping[str, str]) -> str:
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in section.sentences)
    notes = "".join(f"<li>{escape(note)}</li>" for note in section.notes)
    columns = section.columns and f"<details><summary>All columns</summary>{_table(section.columns, looks)}</details>"
    return "".join(
        (
            f'<section id="{anchor}"><h2>{_name(section.title)}</h2><div class="answer">{sentences}</div>',
            _table(section.table, looks),
            _charts(section.charts, looks),
            columns or "",
            _runs(section.runs, looks),
            f'<details><summary>How to read it</summary><ul class="notes">{notes}</ul></details>' if notes else "",
            "</section>",
        )
    )


def _name(text: str) -> str:
    return f"<bdi>{escape(text)}</bdi>"


def _swatch(looks: str) -> str:
    return f'<i class="swatch {looks}"></i>'


def _table(table: Table, looks: Mapping[str, str]) -> str:
    names, *rows = table.cells
    kinds = ["number" if _is_numeric(column) else "text" for column in zip(*table.keys)] or ["text"] * len(names)
    heads = "".join(
        f'<th scope="col" aria-sort="none" class="{kind}"><button type="button">{escape(name)}</button></th>'
        for name, kind in zip(names, kinds, strict=True)
    )
    body = ""
    for (variant, *cells), (_, *keys) in zip(rows, table.keys, strict=True):
        label = f'<th scope="row" data-t="{escape(variant)}"><div>{_swatch(looks[variant])}{_name(variant)}</div></th>'
        body += f"<tr>{label}{''.join(_cell(*cell) for cell in zip(cells, keys, strict=True))}</tr>"
    return _scrolling(f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>')


def _scrolling(table: str) -> str:
    """A container that scrolls sideways, also by the keyboard."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="Table">{table}</div>'


def _is_numeric(keys: Iterable) -> bool:
    known = [key for key in keys if not _is_missing(key)]
    return bool(known) and not any(isinstance(key, str) for key in known)


def _is_missing(value) -> bool:
    return value is None or (not isinstance(value, str) and math.isnan(value))


def _cell(text: str, key) -> str:
    if _is_missing(key):
        return "<td></td>"
    sort = f'data-t="{escape(key)}"' if isinstance(key, str) else f'data-n="{key:.12g}"'.replace("inf", "Infinity")
    if text in VERDICTS:
        return f'<td {sort}><span class="verdict {VERDICTS[text]}">{text}</span></td>'
    value, sign, half = escape(text).partition(" ± ")
    return f"<td {sort}>{value}" + (f' <span class="interval">± {half}</span>' if sign else "") + "</td>"


def _charts(drawn: Sequence[Chart], looks: Mapping[str, str]) -> str:
    try:
        figures = [
            f"<figure><figcaption>{_name(c.title)}</figcaption>{charts.svg(c, list(looks))}</figure>" for c in drawn
        ]
    except UserError as error:  # without matplotlib
        return f'<p class="notes">{escape(str(error))}</p>'
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


# Runs -----------------------------------------------------------------------------------------------------------------


def _runs(runs: Sequence[Run], looks: Mapping[str, str]) -> str:
    """A `<details>` for each variant: its runs, and the fields of their configs that differ from the defaults."""
    by_variant: dict[str, list[Run]] = {}
    for run in runs:
        by_variant.setdefault(run.variant, []).append(run)
    common = {variant: _common([run.fields for run in found]) for variant, found in by_variant.items()}
    everywhere = _common(list(common.values())) if len(common) > 1 else {}
    texts = ""
    for variant, found in by_variant.items():
        own = {name: value for name, value in common[variant].items() if name not in everywhere}
        texts += (
            f"<details><summary>{_swatch(looks[variant])}{_name(variant)}: {len(found)} runs and their config</summary>"
            f"{_run_table(found)}{_fields('Config: different in other variants', own)}"
            f"{_fields('Config: the same in all variants', everywhere)}</details>"
        )
    return texts


def _common(found: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The fields that all of these have, with one value."""
    return {k: v for k, v in found[0].items() if all(k in other and other[k] == v for other in found[1:])}


def _run_table(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.values)
    heads = "".join(f'<th scope="col">{escape(name.replace("_", " "))}</th>' for name in ("run", *names))
    body = ""
    for run in runs:
        cells = "".join(f"<td>{'' if name not in run.values else f'{run.values[name]:.5g}'}</td>" for name in names)
        body += f'<tr><th scope="row">{_name(run.name)}</th>{cells}</tr>'
    return _scrolling(f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>")


def _fields(title: str, fields: Mapping[str, object]) -> str:
    entries = "".join(f"<div><dt>{escape(f)}</dt><dd>{escape(str(value))}</dd></div>" for f, value in fields.items())
    return f"<h4>{title}</h4><dl>{entries}</dl>" if fields else ""
