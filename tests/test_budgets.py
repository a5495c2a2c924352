"""The repository stays within `budgets.toml`."""

import re
from pathlib import Path

import pytest

from tests.seconds import BUDGETS

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("folder, ceiling", BUDGETS["lines"].items())
def test_folder_stays_within_its_line_budget(folder, ceiling):
    files = (ROOT / folder).glob("**/*.py" if "/" in folder else "*.py")
    lines = sum(len(path.read_text().splitlines()) for path in files)
    more = "delete what nobody would miss, or raise the number in tests/budgets.toml and say why in the commit"
    assert lines <= ceiling, f"{folder} has {lines:,} lines of Python, and may have {ceiling:,}: {more}"


def test_every_folder_has_a_ceiling():
    folders = {path.parent for top in ("attnlab", "tests") for path in (ROOT / top).glob("*/*.py")}
    assert {str(path.relative_to(ROOT)) for path in folders} <= set(BUDGETS["lines"])


def test_unwanted_words_do_not_increase():
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in ("attnlab", "benchmarks", "configs", "docs", "studies"):
        files += [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".md", ".py")]
    text = "\n".join(path.read_text() for path in files)
    counts = {word: len(re.findall(word, text)) for word in BUDGETS["words"]}
    more = {word: count for word, count in counts.items() if count > BUDGETS["words"][word]}
    assert not more, f"these words are to become fewer, and not more than in tests/budgets.toml: use others: {more}"
