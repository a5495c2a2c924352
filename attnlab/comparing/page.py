"""One offline HTML page of a comparison: tables to sort, curves with intervals, and the config of every run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import attnlab
from attnlab.comparing import charts
from attnlab.comparing.charts import Chart, Line
from attnlab.support import documents, paths

__all__ = ["Chart", "Line", "Run", "Section", "write"]

FOLDER = Path(__file__).parent
NAME = "comparison.html"
COLORS = 12  # in page.css; later variants repeat them with dashes
BLANK = ("nan", "none")
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


class Run(NamedTuple):
    """A run of a variant.

    Attributes:
      name: of the run, as its workdir has it.
      variant: its name.
      values: seed, learning rate, final loss, …, by name.
      fields: the fields of its config that differ from the defaults.
    """

    name: str
    variant: str
    values: Mapping[str, float]
    fields: Mapping[str, object]


class Section(NamedTuple):
    """One task, or the text.

    Attributes:
      title: of the section.
      cells: the table as texts, header first; the first column has the variants.
      sort_keys: the values of the cells without the header; None and NaN sort last.
      notes: sentences below the table.
      charts: the figures.
      runs: all runs that the table is made of.
    """

    title: str
    cells: list[list[str]]
    sort_keys: list[list[float | str | None]]
    notes: Sequence[str]
    charts: Sequence[Chart]
    runs: Sequence[Run]


def write(folder: Path, title: str, sections: Sequence[Section]) -> Path:
    """Write `comparison.html` into the folder, whole or not at all, and return its path."""
    looks = _looks(sections)
    links = "".join(f'<li><a href="#s{n}">{_name(section.title)}</a></li>' for n, section in enumerate(sections))
    parts = {
        "title": escape(title),
        "version": attnlab.__version__,
        "navigation": f'<nav aria-label="Sections"><ul>{links}</ul></nav>' if len(sections) > 1 else "",
        "sections": "\n".join(_section(n, section, looks) for n, section in enumerate(sections)),
    }
    path = folder / NAME
    paths.write_text(path, documents.valid_unicode(documents.document(FOLDER, parts)))
    return path


def _looks(sections: Sequence[Section]) -> dict[str, str]:
    """The classes of each variant's colour and dashes, the same in all sections."""
    names: dict[str, None] = {}
    for section in sections:
        names |= dict.fromkeys(row[0] for row in section.cells[1:] if row)
        names |= dict.fromkeys(run.variant for run in section.runs)
        names |= dict.fromkeys(line.name for chart in section.charts for line in chart.lines)
    return {name: f"c{n % COLORS}{' dashed' if n >= COLORS else ''}" for n, name in enumerate(names)}


def _section(number: int, section: Section, looks: Mapping[str, str]) -> str:
    ids = {name: n for n, name in enumerate(looks)}
    notes = "".join(f"<li>{escape(note)}</li>" for note in section.notes)
    return "".join(
        (
            f'<section id="s{number}" aria-labelledby="t{number}"><h2 id="t{number}">{_name(section.title)}</h2>',
            _table(section, looks, ids),
            f'<ul class="notes">{notes}</ul>' if notes else "",
            _charts(section.charts, looks, ids),
            _runs(section.runs, looks),
            "</section>",
        )
    )


def _name(text: str) -> str:
    return f"<bdi>{escape(text)}</bdi>"


def _swatch(looks: str) -> str:
    return f'<i class="swatch {looks}"></i>'


# Tables ---------------------------------------------------------------------------------------------------------------


def _table(section: Section, looks: Mapping[str, str], ids: Mapping[str, int]) -> str:
    if not section.cells:
        return ""
    names, *rows = section.cells
    kinds = ["number" if _is_numeric(column) else "text" for column in zip(*section.sort_keys)] or ["text"] * len(names)
    heads = "".join(
        f'<th scope="col" aria-sort="none" class="{kind}"><button type="button">{escape(name)}</button></th>'
        for name, kind in zip(names, kinds, strict=True)
    )
    body = ""
    for (variant, *cells), (_, *keys) in zip(rows, section.sort_keys, strict=True):
        label = f'<th scope="row" data-t="{escape(variant)}"><div>{_swatch(looks[variant])}{_name(variant)}</div></th>'
        others = "".join(_cell(*cell) for cell in zip(cells, keys, strict=True))
        body += f'<tr data-line="{ids[variant]}">{label}{others}</tr>'
    caption = f'<caption class="hidden">{_name(section.title)}: a name of a column sorts by it</caption>'
    return _scrolling(
        f'<table class="sortable">{caption}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>', section.title
    )


def _scrolling(table: str, label: str) -> str:
    """A container that scrolls sideways, also by the keyboard."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="Table: {escape(label)}">{table}</div>'


def _is_numeric(keys: Iterable) -> bool:
    known = [key for key in keys if not _is_missing(key)]
    return bool(known) and not any(isinstance(key, str) for key in known)


def _is_missing(value) -> bool:
    return value is None or (not isinstance(value, str) and math.isnan(value))


def _cell(text: str, key) -> str:
    if _is_missing(key):
        return f"<td>{'' if text.strip().lower() in BLANK else escape(text)}</td>"
    sort = f'data-t="{escape(key)}"' if isinstance(key, str) else f'data-n="{_exact(key)}"'
    if text in VERDICTS:
        return f'<td {sort}><span class="verdict {VERDICTS[text]}">{text}</span></td>'
    value, sign, half = escape(text).partition(" ± ")
    interval = f' <span class="interval">± {half}</span>' if sign else ""
    return f"<td {sort}>{value}{interval}</td>"


def _exact(value) -> str:
    """The number as JavaScript reads it."""
    return "Infinity" if value == math.inf else "-Infinity" if value == -math.inf else f"{value:.12g}"


# Charts ---------------------------------------------------------------------------------------------------------------


def _charts(drawn: Sequence[Chart], looks: Mapping[str, str], ids: Mapping[str, int]) -> str:
    """The charts of a section below one legend, whose buttons emphasize lines."""
    if not drawn:
        return ""
    names = dict.fromkeys(line.name for chart in drawn for line in chart.lines)
    legend = "".join(
        f'<button type="button" aria-pressed="false" data-line="{ids[name]}">{_swatch(looks[name])}{_name(name)}'
        "</button>"
        for name in names
    )
    groups = {name: f'class="{looks[name]}" data-line="{ids[name]}"' for name in names}
    figures = "".join(
        f'<figure><figcaption>{_name(chart.title)}</figcaption><p class="label">{escape(chart.y_label)}</p>'
        f'{charts.svg(chart, groups)}<p class="label below">{escape(chart.x_label)}</p></figure>'
        for chart in drawn
    )
    return (
        f'<div class="legend" role="group" aria-label="Legend: a name emphasizes its line">{legend}</div>'
        f'<div class="charts">{figures}</div>'
    )


# Runs -----------------------------------------------------------------------------------------------------------------


def _runs(runs: Sequence[Run], looks: Mapping[str, str]) -> str:
    """A `<details>` for each variant: its runs, and the fields of their configs that differ from the defaults."""
    by_variant: dict[str, list[Run]] = {}
    for run in runs:
        by_variant.setdefault(run.variant, []).append(run)
    common = {variant: _common([run.fields for run in found]) for variant, found in by_variant.items()}
    everywhere = _common(list(common.values())) if len(common) > 1 else {}
    texts = []
    for variant, found in by_variant.items():
        own = {name: value for name, value in common[variant].items() if name not in everywhere}
        count = f"{len(found)} run{'s' * (len(found) != 1)}"
        texts.append(
            f'<details><summary>{_swatch(looks[variant])}{_name(variant)} <span class="count">{count}</span></summary>'
            f"{_run_table(variant, found, common[variant])}"
            f"{_fields('Config: different in other variants', own)}"
            f"{_fields('Config: the same in all variants', everywhere)}</details>"
        )
    return f'<div class="runs"><h3>Runs and their configs</h3>{"".join(texts)}</div>' if texts else ""


def _common(found: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The fields that all of these have, with one value."""
    first, *others = found
    return {
        name: value for name, value in first.items() if all(name in other and other[name] == value for other in others)
    }


def _run_table(variant: str, runs: Sequence[Run], common: Mapping[str, object]) -> str:
    """The values of each run, and the fields in which the runs differ and which are not among the values."""
    values = dict.fromkeys(name for run in runs for name in run.values)
    fields = dict.fromkeys(
        name for run in runs for name in run.fields if name not in common and name.rpartition(".")[2] not in values
    )
    columns = [_numbers([run.values.get(name) for run in runs]) for name in values]
    heads = "".join(f'<th scope="col">{escape(name.replace("_", " "))}</th>' for name in values)
    heads += "".join(f'<th scope="col">{escape(name)}</th>' for name in fields)
    body = ""
    for n, run in enumerate(runs):
        cells = "".join(f"<td>{column[n]}</td>" for column in columns)
        cells += "".join(f"<td>{escape(str(run.fields[f])) if f in run.fields else 'default'}</td>" for f in fields)
        body += f'<tr><th scope="row">{_name(run.name)}</th>{cells}</tr>'
    head = f'<thead><tr><th scope="col">run</th>{heads}</tr></thead>'
    return _scrolling(f"<table>{head}<tbody>{body}</tbody></table>", f"runs of {variant}")


def _numbers(values: Sequence) -> list[str]:
    """Numbers of five digits and equally many decimals; blank for None and NaN."""
    texts = ["" if _is_missing(value) else f"{value:.5g}" for value in values]
    if any("e" in text or "inf" in text for text in texts):
        return texts
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    return [f"{value:.{decimals}f}" if text else "" for value, text in zip(values, texts)]


def _fields(title: str, fields: Mapping[str, object]) -> str:
    if not fields:
        return ""
    entries = "".join(f"<div><dt>{escape(f)}</dt><dd>{escape(str(value))}</dd></div>" for f, value in fields.items())
    return f"<h4>{title}</h4><dl>{entries}</dl>"
