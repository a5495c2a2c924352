"""A short run of a study, and what is true of every one."""

from collections.abc import Callable

import matplotlib.pyplot as plt
import pytest

from attnlab._studies import _quickstart as quickstart
from attnlab.study.report import Options
from attnlab.support.paths import write_csv


@pytest.fixture
def run_fast(tmp_path) -> Callable:
    """`run_fast(study, path="")` returns the rows of a run with --fast.

    Its progress has ended at the total that was announced, and its rows are judged, drawn and written.
    """

    def run(study, path: str = "") -> list[dict]:
        totals, done = [], []

        def announce(total):
            totals.append(total)
            return lambda amount=1: done.append(amount)

        rows = study.measure(Options(fast=True, path=path, progress=announce))
        assert len(totals) == 1 and totals[0] > 0 and sum(done) == pytest.approx(totals[0])
        assert study.judge(rows).parts
        figure = study.draw(rows)
        drawn = [axes for axes in figure.axes if axes.lines]
        assert figure.get_suptitle() and all(axes.get_xlabel() and axes.get_ylabel() for axes in drawn)
        figure.savefig(tmp_path / "figure.png")
        plt.close(figure)
        write_csv(tmp_path / "rows.csv", rows)
        return rows

    return run


@pytest.fixture
def small_quickstart(monkeypatch) -> None:
    """Makes the quickstart's model narrow, and its batches small."""
    config = quickstart.CONFIG.copy_and_resolve_references()
    config.model.width, config.batch_size = 16, 2
    monkeypatch.setattr(quickstart, "CONFIG", config)
