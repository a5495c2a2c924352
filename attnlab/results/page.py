"""One offline HTML page of results: the answer in sentences, tables, figures, and their provenance."""

import types
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from attnlab.results.charts import Figure
from attnlab.results.table import Table, is_missing
from attnlab.support import documents, paths
from attnlab.support.errors import UserError

FOLDER = Path(__file__).parent
COLORS = 12  # in page.css; further variants repeat them
LOOKS = {  # classes in page.css, by outcome
    "better": "good better",
    "worse": "bad worse",
    **dict.fromkeys(("reproduced", "holds", "right"), "good"),
    **dict.fromkeys(("failed", "not reproduced", "does not hold", "wrong", "ignored"), "bad"),
    **dict.fromkeys(("not told apart", "same sign only", "underpowered", "not trained far enough"), "open"),
    **dict.fromkeys(("refused", "slow", "not run yet"), "open"),
}


class Section(NamedTuple):
    """One task, text, study, or check.

    Attributes:
      title: heading of the section.
      sentences: the answer.
      command: a command with enough seeds to decide the open differences.
      table: the main columns.
      figures: shown below the table.
      notes: sentences on how to read the section, beyond the columns' help.
      folded: collapsed tables and texts, by name.
      opened: expanded texts, by name.
    """

    title: str
    sentences: Sequence[str] = ()
    command: str = ""
    table: Table | None = None
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    folded: Mapping[str, Table | str] = types.MappingProxyType({})
    opened: Mapping[str, str] = types.MappingProxyType({})

    @property
    def names(self) -> list[str]:
        """The names that have colours in the section's figures."""
        if self.table is None or not any(figure.draw for figure in self.figures):
            return []
        return [row[self.table.columns[0].key] for row in self.table.rows]


def write(path: Path, title: str, about: Mapping[str, str], sections: Sequence[Section]) -> Path:
    """Write a page atomically and return its path; `about` describes the origin of the results, by name."""
    links = "".join(f'<li><a href="#s{n}">{_name(section.title)}</a></li>' for n, section in enumerate(sections))
    names = list(dict.fromkeys(name for section in sections for name in section.names))
    parts = {
        "title": escape(title),
        "subtitle": escape(" · ".join(about[name] for name in ("date", "training", "machine") if name in about)),
        "about": "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in about.items()),
        "navigation": f'<nav aria-label="Sections"><ul>{links}</ul></nav>' if len(sections) > 1 else "",
        "sections": "\n".join(_section(f"s{n}", section, names) for n, section in enumerate(sections)),
    }
    paths.write_text(path, documents.valid_unicode(documents.document(FOLDER, parts)))
    return path


def fragment(section: Section) -> str:
    """The answer and the table of a section, for a notebook."""
    table = "".join(f"<th>{escape(head)}</th>" for head in section.table.heads)
    for row in section.table.cells():
        table += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    return f"<h4>{escape(section.title)}</h4>{_answer(section)}<table>{table}</table>"


def _answer(section: Section) -> str:
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in section.sentences)
    command = (
        f'<p class="soft">To decide, add seeds: <code>{escape(section.command)}</code></p>' if section.command else ""
    )
    return f'<div class="answer">{sentences}{command}</div>'


def _section(anchor: str, section: Section, names: Sequence[str]) -> str:
    folded = {name: _folded(content, names) for name, content in section.folded.items()}
    tables = [each for each in (section.table, *section.folded.values()) if isinstance(each, Table)]
    if help := _help(tables, section.notes):
        folded["How to read it"] = help
    opened = "".join(
        f"<details open><summary>{_name(n)}</summary>{_folded(x, ())}</details>" for n, x in section.opened.items()
    )
    return "".join(
        (
            f'<section id="{anchor}"><h2>{_name(section.title)}</h2>',
            _answer(section),
            _table(section.table, names) if section.table else "",
            _figures(section.figures, names),
            opened,
            *(f"<details><summary>{_name(name)}</summary>{content}</details>" for name, content in folded.items()),
            "</section>",
        )
    )


def _folded(content: Table | str, names: Sequence[str]) -> str:
    return _table(content, names) if isinstance(content, Table) else f"<pre>{escape(content)}</pre>"


def _help(tables: Sequence[Table], notes: Sequence[str]) -> str:
    """The notes, and the help of each column."""
    columns = {column.key: column for table in tables for column in table.columns if column.title and column.help}
    terms = "".join(
        f"<div><dt>{escape(each.title)}</dt><dd>{escape(each.help)}</dd></div>" for each in columns.values()
    )
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (f'<ul class="notes">{items}</ul>' if notes else "") + (f'<dl class="help">{terms}</dl>' if terms else "")


def _name(text: str) -> str:
    return f"<bdi>{escape(text)}</bdi>"


def _table(table: Table, names: Sequence[str]) -> str:
    kinds = ["number" if _is_numeric(row[c.key] for row in table.rows) else "text" for c in table.columns]
    heads = "".join(
        f'<th scope="col" aria-sort="none" class="{kind}"><button type="button">{escape(column.title)}'
        + (f" <small>{escape(column.unit)}</small>" if column.unit else "")
        + "</button></th>"
        for column, kind in zip(table.columns, kinds, strict=True)
    )
    body, (first, *others) = "", table.columns
    for row in table.rows:
        color = f'<i class="swatch c{names.index(row[first.key]) % COLORS}"></i>' if row[first.key] in names else ""
        label = f'<th scope="row"{_key(row[first.key])}><div>{color}{_name(first.cell(row))}</div></th>'
        body += f"<tr>{label}{''.join(_cell(column.cell(row), row[column.key]) for column in others)}</tr>"
    drawn = f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll" role="region" tabindex="0" aria-label="Table">{drawn}</div>'  # scrolls by keyboard


def _is_numeric(values) -> bool:
    known = [value for value in values if not is_missing(value)]
    return bool(known) and not any(isinstance(value, str) for value in known)


def _key(value) -> str:
    """The attribute by which page.js sorts a cell."""
    if isinstance(value, str):
        return f' data-t="{escape(value)}"'
    return "" if is_missing(value) else f' data-n="{value:.12g}"'.replace("inf", "Infinity")


def _cell(text: str, value) -> str:
    if isinstance(value, str) and value in LOOKS:
        return f'<td{_key(value)}><span class="verdict {LOOKS[value]}">{escape(text)}</span></td>'
    mean, sign, half = escape(text).partition(" ± ")
    return f"<td{_key(value)}>{mean}" + (f' <span class="interval">± {half}</span>' if sign else "") + "</td>"


def _figures(figures: Sequence[Figure], names: Sequence[str]) -> str:
    try:
        drawn = "".join(_figure(each, names) for each in figures)
    except UserError as error:  # without matplotlib
        return f'<p class="notes">{escape(str(error))}</p>'
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _figure(figure: Figure, names: Sequence[str]) -> str:
    image = f'<img alt="{escape(figure.alt)}" src="{figure.address(names)}">'
    kind = "chart" if figure.draw else "picture"
    return f'<figure class="{kind}"><figcaption>{_name(figure.title)}</figcaption>{image}</figure>'
