"""Ratios of measured seconds, and progress by rounds."""

from attnlab._benchmarks.harness import tables


def test_ratio_is_the_median_of_ratios_within_rounds():
    assert tables.ratio({"a": [2.0, 30.0, 8.0], "b": [1.0, 10.0, 4.0]}, "a", "b") == 2


def test_rounds_prints_what_is_done_and_left(capsys):
    assert list(tables.rounds("small", 2)) == [0, 1]
    assert capsys.readouterr().out == "small: round 1 of 2, about 0 s left\nsmall: round 2 of 2\n"
