"""Write the minutes of CONTRIBUTING.md's table of commands, from the last run of `.ci/run`.

    python docs/minutes.py

`.ci/run` writes the seconds of its commands to `build/seconds.txt`; here they become minutes, with the processor that
they were measured on. Commands that it does not run keep their minutes in the table.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = ROOT / "build" / "seconds.txt"
PAGE = ROOT / "CONTRIBUTING.md"


def processor() -> str:
    """The processor's maker, family and model, e.g. "AMD EPYC, family 25, model 17"."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return f"{fields['model name']}, family {fields['cpu family']}, model {fields['model']}"


def main():
    measured = {}
    for line in SECONDS.read_text().splitlines():
        seconds, command = line.split(maxsplit=1)
        measured[" ".join(command.split()[:2])] = int(seconds) / 60  # without PYTHON= and VENV=
    page, changed = PAGE.read_text(), 0
    for command, minutes in measured.items():
        number = f"{minutes:.1f}" if minutes < 10 else f"{minutes:.0f}"
        row = rf"^(\| `{re.escape(command)}` \|.*\| )[^|]*( \|)$"
        page, replaced = re.subn(row, rf"\g<1>{number}\2", page, flags=re.M)
        changed += replaced
    page = re.sub(r"(?<=^Minutes on two cores \().*(?=\), without)", processor(), page, flags=re.M)
    PAGE.write_text(page)
    print(f"{changed} commands in CONTRIBUTING.md have the minutes of {SECONDS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
