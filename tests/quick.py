"""The fast tests for what differs from main, and a few from every floor, in about two minutes: `make quick`.

The tests of a file are in the folder that mirrors its folder; tests of a command are in files named after the command.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# One quick file from each floor.
SMOKE = (
    "support/test_support_options.py",
    "ops/test_masks.py",
    "data/test_batches.py",
    "nn/test_config.py",
    "generation/test_drawing.py",
    "interop/test_model_files.py",
    "training/test_metrics.py",
    "see/test_effects.py",
    "comparing/test_table.py",
    "test_budgets.py",
)


def changed() -> list[Path]:
    """The files that differ from the main branch, committed or not, and new ones."""

    def lines(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, text=True, capture_output=True, check=True).stdout.splitlines()

    (main,) = lines("for-each-ref", "--format=%(refname)", "refs/remotes/origin/main") or ["main"]
    base = lines("merge-base", "HEAD", main)
    names = lines("diff", "--name-only", *base) + lines("ls-files", "--others", "--exclude-standard")
    return list(map(Path, names))


def tests_of(file: Path) -> set[Path]:
    """The folder or files that test a file."""
    top, *inner = file.parts
    if top == "tests":
        return {file} if file.name.startswith("test_") else set()
    folder = Path("tests", *(inner[:-1] if top == "attnlab" else [top]))
    if folder != Path("tests"):
        return {folder} if (ROOT / folder).is_dir() else set()
    return {path.relative_to(ROOT) for path in (ROOT / "tests").glob(f"test_{file.stem}*.py")}


def main(options: list[str]) -> int:
    """Run the tests; returns pytest's exit code."""
    selected = set().union(*(tests_of(file) for file in changed()), {Path("tests", name) for name in SMOKE})
    paths = sorted(str(path) for path in selected if (ROOT / path).exists() and not selected & {*path.parents})
    print(f"the tests in {', '.join(paths)}", flush=True)
    return pytest.main([*options, *(str(ROOT / path) for path in paths)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
