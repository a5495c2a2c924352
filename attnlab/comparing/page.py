"""One offline HTML page of results: the answer in sentences, a table, curves, and what they are of."""

import math
import types
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


class Section(NamedTuple):
    """One task, or the text.

    Attributes:
      title: of the section.
      sentences: the answer.
      table: the columns that it is about.
      notes: sentences below the table.
      charts: the figures.
      folded: tables behind a summary, by name: all columns, all runs.
    """

    title: str
    sentences: Sequence[str]
    table: Table
    notes: Sequence[str]
    charts: Sequence[Chart] = ()
    folded: Mapping[str, Table] = types.MappingProxyType({})


def write(folder: Path, title: str, about: Mapping[str, str], sections: Sequence[Section]) -> Path:
    """Write `comparison.html` into the folder, whole or not at all, and return its path; `about` says what it is of."""
    path = folder / NAME
    links = "".join(f'<li><a href="#s{n}">{_name(section.title)}</a></li>' for n, section in enumerate(sections))
    parts = {
        "title": escape(title),
        "subtitle": escape(" · ".join(about[name] for name in ("date", "training", "machine") if name in about)),
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
    folded = {name: _table(table, looks) for name, table in section.folded.items()}
    folded |= {"How to read it": f'<ul class="notes">{notes}</ul>'} if notes else {}
    return "".join(
        (
            f'<section id="{anchor}"><h2>{_name(section.title)}</h2><div class="answer">{sentences}</div>',
            _table(section.table, looks),
            _charts(section.charts, looks),
            *(f"<details><summary>{name}</summary>{content}</details>" for name, content in folded.items()),
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
