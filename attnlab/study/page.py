"""The HTML report of several studies: one file that works offline, without scripts."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attnlab.study.running import Result

STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2f7d4f; --bad: #b3402f; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; }
h2 { font-size: 1.25rem; margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
td.number { text-align: right; white-space: nowrap; }
figure { margin: 1rem 0; }
img { max-width: min(100%, 54rem); height: auto; background: #fff; border-radius: 4px; }
.held { color: var(--good); font-weight: 600; } .failed { color: var(--bad); font-weight: 600; }
@media (prefers-color-scheme: dark) { :root { --good: #6ecf96; --bad: #f08a78; } }
.small { font-size: .85rem; opacity: .8; } p.setup { white-space: pre-line; }
td.verdict { white-space: nowrap; width: 1%; }
"""


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
    rows = "".join(map(_summary_row, outcomes))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Studies of attention: {summary}</title><style>{STYLE}</style></head><body>
<h1>Studies of attention: {summary}</h1>
<table><thead><tr><th>study</th><th>claim</th><th>verdict</th><th>seeds</th><th>time</th></tr></thead>
<tbody>{rows}</tbody></table>
<p class="small">{_machines(ran)}</p>
{"".join(_section(outcome.result, folder) for outcome in outcomes if outcome.result)}
</body></html>
"""


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
    return f"""<h2 id="{name}">{name}</h2>
<p><strong>{html.escape(result.claim)}</strong></p>
<figure><img alt="{name}: the measured figure" src="data:image/png;base64,{figure}">
<figcaption class="small">{html.escape(result.caption)}</figcaption></figure>
<table>{parts}</table>
{_quoted(result.quoted)}
<details><summary>How it was measured</summary><p class="setup">{html.escape(result.setup)}</p></details>
<p class="small">{facts}{text}</p>
"""


def _quoted(quoted: list[dict]) -> str:
    if not quoted:
        return ""
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(each[field])}</td>" for field in ("what", "ours", "theirs", "source"))
        + "</tr>"
        for each in quoted
    )
    head = "<tr><th>measured</th><th>here</th><th>paper</th><th>source</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _mark(good: bool, text: str) -> str:
    return f'<span class="{"held" if good else "failed"}">{"✓" if good else "✗"} {text}</span>'


def _machines(results: Sequence[Result]) -> str:
    """On what the studies ran, each combination once."""
    versions = (", ".join(f"{name} {version}" for name, version in result.versions.items()) for result in results)
    ran = (f"{result.machine}; {version}" for result, version in zip(results, versions))
    return "<br>".join(html.escape(text) for text in dict.fromkeys(ran))
