"""Pictures show what they are given, with axes that are named."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from attnlab import plots
from attnlab.masks import Causal, SlidingWindow

WORDS = ["Your", "journey", "starts"]


@pytest.fixture(autouse=True)
def agg(monkeypatch):
    plt.switch_backend("agg")
    yield
    plt.close("all")


def test_a_heat_map_has_a_row_for_each_query_and_a_column_for_each_key():
    w = np.arange(6).reshape(2, 3) / 6
    figure = plots.weights(w, "starts is looked at", queries=["a", "b"], keys=WORDS, marks=[2, -1])
    axes = figure.axes[0]
    np.testing.assert_allclose(axes.images[0].get_array(), w)
    assert [label.get_text() for label in axes.get_xticklabels()] == WORDS
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    np.testing.assert_array_equal(axes.collections[0].get_offsets(), [[2, 0]])
    assert figure.get_suptitle() == "starts is looked at"


def test_heads_share_one_scale_and_get_a_name_each():
    figure = plots.heads(np.stack([np.eye(3), np.eye(3) / 2]), "Two heads", tokens=WORDS)
    first, second = figure.axes[:2]
    assert first.images[0].get_clim() == second.images[0].get_clim() == (0, 1)
    assert [axes.get_title() for axes in (first, second)] == ["head 0", "head 1"]


def test_masks_are_drawn_as_they_are():
    figure = plots.masks(
        {"causal": Causal(), "window": SlidingWindow(left=1), "none": np.ones((4, 4))}, "Masks", length=4
    )
    shown = [np.asarray(axes.images[0].get_array()) for axes in figure.axes]
    np.testing.assert_array_equal(shown[0], np.tri(4))
    np.testing.assert_array_equal(shown[2], np.ones((4, 4)))


@pytest.mark.parametrize("log", ["", "x", "y", "xy"])
def test_lines_have_names_scales_and_bands(log):
    figure = plots.lines(
        {"a": ([1, 10], [1, 2]), "theory": ([1, 10], [1, 3])},
        "A rises",
        x="n (tokens)",
        y="time (ms)",
        log=log,
        spread={"a": [0.1, 0.1]},
        dashed=["theory"],
    )
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("n (tokens)", "time (ms)")
    assert (axes.get_xscale() == "log", axes.get_yscale() == "log") == ("x" in log, "y" in log)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "theory"]
    assert len(axes.collections) == 1


def test_a_name_has_one_colour_in_all_panels():
    panel = {"x": "x", "y": "y"}
    figure = plots.panels(
        {
            "one": panel | {"series": {"a": ([1], [1]), "b": ([1], [1])}},
            "two": panel | {"series": {"b": ([1], [1])}},
        },
        "Two",
    )
    first, second = figure.axes
    assert first.lines[1].get_color() == second.lines[0].get_color()


def test_a_long_title_is_wrapped():
    figure = plots.lines({"a": ([1], [1])}, "word " * 40, x="x", y="y")
    assert "\n" in figure.get_suptitle()


def test_training_curves_keep_training_and_validation_apart():
    records = [{"step": s, "split": split, "loss": s} for split in ("train", "val", "final") for s in (1, 2)]
    figure = plots.training({"sancho": records}, "It learns")
    assert [line.get_label() for line in figure.axes[0].lines] == ["sancho, train", "sancho, val"]
