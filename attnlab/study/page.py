"""The HTML report of several studies: one file that works offline, without scripts."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attnlab.study.running import Result
from attnlab.support import documents

FOLDER = Path(__file__).parent


class Outcome(NamedTuple):
    """How a study ended: its result, or the last line that it printed if it failed; neither before it has run."""

    name: str
    result: Result | None = None
    error: str = ""


def render(outcomes: Sequence[Outcome], folder: Path) -> str:
    """The report: a table of the verdicts, then each study with its figure, which is in its folder within `folder`."""
    ran = [outcome.result for outcome in outcomes if outcome.result]
    held = sum(result.held for result in ran)
    failed = sum(bool(outcome.error) for outcome in outcomes)
    summary = f"{held} of {len(ran)} claims hold" + (f"; {failed} failed to run" if failed else "")
    waiting = len(outcomes) - len(ran) - failed
    summary += f"; {waiting} not run yet" if waiting else ""
    parts = {
        "summary": summary,
        "rows": "".join(map(_summary_row, outcomes)),
        "machines": _machines(ran),
        "sections": "".join(_section(outcome.result, folder) for outcome in outcomes if outcome.result),
    }
    return documents.document(FOLDER, parts)


def _summary_row(outcome: Outcome) -> str:
    name = html.escape(outcome.name)
    if outcome.result is None:
        state = _mark(False, "failed to run") if outcome.error else "not run yet"
        error = html.escape(outcome.error)
        return f'<tr><td>{name}</td><td>{error}</td><td class="verdict">{state}</td><td></td><td></td></tr>'
    result = outcome.result
    verdict = _mark(result.held, "holds" if result.held else "does not hold")
    return (
        f'<tr><td><a href="#{name}">{name}</a></td><td>{html.escape(result.claim)}</td>'
        f'<td class="verdict">{verdict}</td><td class="number">{result.seeds or ""}</td>'
        f'<td class="number">{result.seconds:.0f} s</td></tr>'
    )


def _section(result: Result, folder: Path) -> str:
    name = html.escape(result.name)
    parts = "".join(
        f'<tr><td class="verdict">{_mark(held, "held" if held else "failed")}</td><td>{html.escape(text)}</td></tr>'
        for held, text in result.parts
    )
    figure = base64.b64encode((folder / result.name / f"{result.name}.png").read_bytes()).decode()
    facts = f"{'--fast, ' if result.fast else ''}{result.rows} rows in {name}/{name}.csv, {result.date}"
    text = f", text {html.escape(result.path)}" if result.path else ""
    return f"""<section id="{name}"><h2>{name}</h2>
<p><strong>{html.escape(result.claim)}</strong></p>
<figure><img alt="{name}: the measured figure" src="data:image/png;base64,{figure}">
<figcaption class="small">{html.escape(result.caption)}</figcaption></figure>
<table>{parts}</table>
<details><summary>How it was measured</summary><p class="setup">{html.escape(result.setup)}</p></details>
<p class="small">{facts}{text}</p></section>
"""


def _mark(good: bool, text: str) -> str:
    return f'<span class="{"held" if good else "failed"}">{"✓" if good else "✗"} {text}</span>'


def _machines(results: Sequence[Result]) -> str:
    """On what the studies ran, each combination once."""
    versions = (", ".join(f"{name} {version}" for name, version in result.versions.items()) for result in results)
    ran = (f"{result.machine}; {version}" for result, version in zip(results, versions))
    return "<br>".join(html.escape(text) for text in dict.fromkeys(ran))
