"""A plugin that prints the slowest test files, and fails the run if one takes more than its share of the time."""

import collections
import tomllib
from pathlib import Path

import pytest

BUDGETS = tomllib.loads(Path(__file__).with_name("budgets.toml").read_text())
SHOWN = 10


class SecondsByFile:
    """Sums setup, call and teardown of each file's tests; the share is checked where all fast tests run."""

    def __init__(self, config: pytest.Config):
        self.seconds = collections.Counter()
        whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        is_fast = whole and config.option.markexpr.startswith("not slow") and not config.option.keyword
        self.share = BUDGETS["seconds"]["share"] if is_fast else 1.0

    def pytest_runtest_logreport(self, report: pytest.TestReport):
        self.seconds[report.nodeid.split("::")[0]] += report.duration

    def above(self) -> dict[str, float]:
        """Files above the allowed share of the time, and their shares."""
        total = self.seconds.total()
        return {file: took / total for file, took in self.seconds.items() if took > self.share * total}

    def pytest_sessionfinish(self, session: pytest.Session):
        if self.above() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter):
        if len(self.seconds) > SHOWN:
            terminalreporter.section(f"the {SHOWN} slowest of {len(self.seconds)} files, seconds")
            for file, took in self.seconds.most_common(SHOWN):
                terminalreporter.line(f"{took:7.1f}  {took / self.seconds.total():5.1%}  {file}")
        for file, share in self.above().items():
            terminalreporter.line(
                f"{file} takes {share:.1%} of the time, more than {self.share:.0%}: make its tests faster or slow, or "
                "raise seconds.share of tests/budgets.toml",
                red=True,
            )
