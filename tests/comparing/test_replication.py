"""Published tables beside ours: outcomes, rows, and mistakes in a file."""

import numpy as np
import pytest

from attnlab.comparing import replication
from attnlab.comparing.replication import Published, outcome
from attnlab.results import statistics
from attnlab.results.table import Table
from attnlab.support.errors import UserError

VARIANTS = ["softmax", "delta"]


@pytest.mark.parametrize(
    "published, ours, expected",
    [
        (-0.3, (-0.4, -0.1), "reproduced"),
        (0.3, (0.29, 0.305), "reproduced"),
        (0.3, (0.301, 0.309), "reproduced"),  # within the margin
        (-0.01001, (-0.9, -0.8), "same sign only"),
        (0.3, (0.35, 0.45), "same sign only"),
        (-0.3, (0.08, 0.12), "not reproduced"),
        (-0.3, (-0.05, 0.05), "not reproduced"),
        (-0.3, (-0.5, 0.1), "underpowered"),
        (0.0, (-0.005, 0.005), "reproduced"),
        (0.0, (0.02, 0.04), "not reproduced"),
        (0.0, (-0.04, -0.02), "not reproduced"),
        (0.0, (-0.005, 0.03), "underpowered"),
        (0.009, (-0.005, 0.008), "reproduced"),  # up to the margin
    ],
)
def test_outcome_follows_from_interval_and_published_difference(published, ours, expected):
    low, high = ours
    assert outcome(published, (low + high) / 2, (high - low) / 2, margin=0.01) == expected


def test_outcome_of_one_seed_is_underpowered():
    assert outcome(-0.3, -0.3, np.nan, margin=0.01) == "underpowered"


def test_rows_are_paired_by_seed_and_leave_failed_runs_out():
    published = Published("a paper", {"softmax": 0.9, "delta": 0.8}, margin=0.01, differs="")
    results = {"softmax": [0.9, 0.7, 0.8], "delta": [0.801, np.nan, 0.699], "more": [0, 0, 0]}
    table = Table.of(replication.columns(3, 3), replication.subjects(published, results, chance=0.1))
    softmax, delta = table.rows
    assert softmax["ours"] == pytest.approx(0.8) and softmax["outcome"] is None
    assert delta["ours"] == pytest.approx(0.75) and delta["difference"] == pytest.approx(-0.1)
    assert delta["published_difference"] == pytest.approx(-0.1) and delta["outcome"] == "reproduced"
    (joint,) = statistics.differences(np.array(list(results.values()))[:2], of=2)
    assert delta["difference_interval"] == pytest.approx(joint.interval)  # as in the comparison's table
    assert table.shown().only("published_difference").cells() == [[""], ["−0.100"]]


@pytest.mark.parametrize(
    "ours, outcomes",
    [
        ((0.50, 0.50, 0.50), ["not trained far enough"] * 2),  # delta is as far from attention as published
        ((0.42, 0.42, 0.99), ["not trained far enough"] * 2),
        ((0.50, 0.50, 0.96), ["reproduced", "same sign only"]),
        ((np.nan, 0.50, 0.99), ["underpowered"] * 2),
    ],
)
def test_outcome_needs_runs_that_learnt(ours, outcomes):
    published = Published("", {"attention": 0.511, "delta": 0.5085, "delta to 2": 1.0}, margin=0.016, differs="")
    results = {name: [mean - 2e-4, mean + 1e-4] for name, mean in zip(published.results, ours)}
    assert [row.outcome for row in replication.subjects(published, results, chance=0.5)] == [None, *outcomes]


@pytest.mark.parametrize(
    "fields, message",
    [
        ('"source": "s"', "missing 3 required .*: expected a dictionary of source, results, margin, differs, length"),
        (
            '"source": "", "results": {"softmaks": 1}, "margin": 0, "differs": ""',
            "has 'softmaks': expected variants; in protocol: config fields",
        ),
        ('"source": "", "results": {"delta": 1}, "margin": 0, "differs": ""', "no result of 'softmax', the first"),
        (
            '"source": "", "results": {}, "margin": 0, "differs": "", "protocol": {"step": 1}',
            "has 'step': expected",
        ),
    ],
)
def test_mistake_in_published_results_raises_one_line(tmp_path, fields, message):
    file = tmp_path / "mine.py"
    file.write_text(f"PUBLISHED = {{'recall': {{{fields}}}}}")
    with pytest.raises(UserError, match=rf"mine.py: PUBLISHED\['recall'\].*{message}") as raised:
        replication.published(str(file), VARIANTS)
    assert "\n" not in str(raised.value)


def test_file_without_published_results_has_none(tmp_path):
    (tmp_path / "mine.py").write_text("")
    assert replication.published(str(tmp_path / "mine.py"), VARIANTS) == {}
