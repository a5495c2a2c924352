"""The repository stays within `budgets.toml`."""

import re
from pathlib import Path

import pytest

from tests.seconds import BUDGETS

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("folder, ceiling", BUDGETS["lines"].items())
def test_folder_has_at_most_its_lines(folder, ceiling):
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))
    assert lines <= ceiling, "delete what nobody would miss, or raise the ceiling in tests/budgets.toml and say why"


def test_unwanted_words_only_become_fewer():
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in ("attnlab", "benchmarks", "configs", "docs", "studies"):
        files += [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".md", ".py")]
    text = "\n".join(path.read_text() for path in files)
    counts = {word: len(re.findall(word, text)) for word in BUDGETS["words"]}
    more = {word: count for word, count in counts.items() if count > BUDGETS["words"][word]}
    assert not more, "these words are to become fewer, not more: use others"
    assert counts == BUDGETS["words"], "there are fewer now: write the counts into tests/budgets.toml"
