"""Write the tables of docs/guide/conformance.md from new checks.

python docs/conformance.py                                 # all functions that are installed: four minutes
python docs/conformance.py jax.nn.dot_product_attention    # only this one

The checks stay in build/conformance; the tables show all of them.
"""

import json
import platform
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

from attnlab.testing import FEATURES
from attnlab.testing.peers import PEERS

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "docs" / "guide" / "conformance.txt"
CHECKS = ROOT / "build" / "conformance"


def main(names: list[str]) -> int:
    """Check the named functions, or all, and write the tables."""
    for name in names or PEERS:
        command = [sys.executable, "-m", "attnlab", "conform", name, f"--out={CHECKS / name}"]
        code = subprocess.run(command, check=False).returncode
        print(f"{name}: {['right in all that it takes', 'wrong in something', 'not checked'][code]}", flush=True)
    checks = [json.loads(file.read_text()) for name in PEERS if (file := CHECKS / name / "conformance.json").exists()]
    TABLES.write_text(f"{_section('table', _table(checks))}{_section('findings', _findings(checks))}", encoding="utf-8")
    return 0


def _section(name: str, lines: list[str]) -> str:
    return "\n".join([f"--8<-- [start:{name}]", *lines, f"--8<-- [end:{name}]", ""])


def _table(checks: list[dict]) -> list[str]:
    outcomes = [{row["feature"]: row["outcome"] for row in check["rows"]} for check in checks]
    names = [_short(check["function"]) for check in checks]
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(checks)}"]
    lines += [
        f"| {feature} | {' | '.join(_cell(checked.get(feature, '')) for checked in outcomes)} |" for feature in FEATURES
    ]
    choices = list(dict.fromkeys(choice for check in checks for choice in check["meanings"]))
    for choice in choices:
        lines.append(f"| *{choice}* | {' | '.join(check['meanings'].get(choice, '') for check in checks)} |")
    versions = ", ".join(dict.fromkeys(check["version"] for check in checks))
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    machine = model[1] if model else platform.machine()
    return [*lines, "", f"{versions}, on two cores of an {machine}, {date.today()}."]


def _short(function: str) -> str:
    first, *_, last = function.split(".")
    module = first if first == "torch" else function.removesuffix(f".{last}")
    return f"`{module}`" if last == "dot_product_attention" else f"`{module}` {last.replace('_', ' ')}"


def _cell(outcome: str) -> str:
    return f"**{outcome}**" if outcome in ("wrong", "ignored") else {"refused": "–"}.get(outcome, outcome)


def _findings(checks: list[dict]) -> list[str]:
    lines = []
    for check in checks:
        for row in check["rows"]:
            if row["code"]:
                lines += [f"`{check['function']}`, {row['feature']}: {row['why']}.", "", "```text", row["code"].strip()]
                lines += ["```", ""]
    return lines or ["None."]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
