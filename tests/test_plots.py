"""Plots draw the values they are given, with named axes and labels that can be read."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.text import Text

from attnlab import plots
from attnlab.masks import Causal, SlidingWindow

WORDS = ["Your", "journey", "starts"]


@pytest.fixture(autouse=True)
def agg():
    plt.switch_backend("agg")
    yield
    plt.close("all")


def test_weights_have_a_row_per_query_and_a_column_per_key():
    w = np.arange(6).reshape(2, 3) / 6
    figure = plots.weights(w, "starts gets most", queries=["a", "b"], keys=WORDS, marks=[2, -1])
    axes = figure.axes[0]
    np.testing.assert_allclose(axes.images[0].get_array(), w)
    assert [label.get_text() for label in axes.get_xticklabels()] == WORDS
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    np.testing.assert_array_equal(axes.collections[0].get_offsets(), [[2, 0]])
    assert figure.get_suptitle() == "starts gets most"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["correct key"]


def test_heads_share_a_color_scale_and_have_names():
    figure = plots.heads(np.stack([np.eye(3), np.eye(3) / 2]), "Two heads", tokens=WORDS)
    first, second = figure.axes[:2]
    assert first.images[0].get_clim() == second.images[0].get_clim() == (0, 1)
    assert [axes.get_title() for axes in (first, second)] == ["head 0", "head 1"]


@pytest.mark.parametrize("draw, count", [(plots.weights, 120), (plots.heads, 25)])
def test_token_labels_never_overlap(draw, count):
    tokens = [f"word{i}" for i in range(count)]
    shape = (2, count, count) if draw is plots.heads else (count, count)
    figure = draw(np.zeros(shape), "Many tokens", **{"tokens" if draw is plots.heads else "queries": tokens})
    figure.draw_without_rendering()
    points = 72 / figure.dpi
    for axes in figure.axes[:-1]:  # the last is the colour bar's
        for axis, direction in ((axes.xaxis, 0), (axes.yaxis, 1)):
            labels = [label for label in axis.get_ticklabels() if label.get_visible() and label.get_text()]
            assert not labels or (labels[0].get_text() == "word0" and len(labels) >= min(count, 15))
            for one, other in itertools.pairwise(labels):
                places = axes.transData.transform([(one.get_position()), (other.get_position())])
                distance = points * abs(places[1] - places[0])[direction]
                # The lines of rotated text are nearer to one another than their anchors.
                assert distance * np.sin(np.radians(one.get_rotation() or 90)) >= one.get_fontsize()


def test_masked_cells_are_drawn_unlike_zero_weights():
    w = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    for figure in (plots.weights(w, "One", mask=Causal()), plots.heads([w, w], "Two", mask=np.tri(3))):
        image = figure.axes[0].images[0]
        colors = image.to_rgba(image.get_array())
        assert not np.array_equal(colors[0, 1], colors[1, 0])
        np.testing.assert_array_equal(image.get_array().mask, ~np.tri(3, dtype=bool))
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["masked"]
    assert not plots.weights(w, "No mask").legends


def test_scores_of_minus_infinity_are_drawn_as_masked():
    image = plots.weights([[1.0, -np.inf], [2.0, 3.0]], "Scores").axes[0].images[0]
    np.testing.assert_array_equal(image.get_array().mask, [[False, True], [False, False]])
    assert image.get_clim() == (0, 3)


def test_curve_over_words_is_labelled_at_its_last_finite_point():
    (text,) = plots.lines({"a": (["1", "2", "4"], [1, 2, np.nan])}, "A", x="depth", y="y", labels="line").axes[0].texts
    assert text.get_text() == "a" and text.xy == (1, 2)


@pytest.mark.parametrize("log", ["x", "y"])
def test_lines_have_names_scales_and_bands(log):
    series = {"a": ([1, 10], [1, 2]), "theory": ([1, 10], [1, 3])}
    options = {"x": "n (tokens)", "y": "time (ms)", "log": log, "spread": {"a": [0.1, 0.1]}, "dashed": ["theory"]}
    (axes,) = plots.lines(series, "A rises", **options).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("n (tokens)", "time (ms)")
    assert (axes.get_xscale() == "log", axes.get_yscale() == "log") == ("x" in log, "y" in log)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "theory"]
    assert len(axes.collections) == 1


def test_line_labels_do_not_overlap_and_bands_take_absolute_ends():
    series = {str(n): ([0, 1], [3, 1 + n / 1000]) for n in range(6)} | {"point": ([0.1], [2]), "empty": ([0], [np.nan])}
    spread = {"0": ([2, np.nan], [4, np.nan]), "point": ([1], [5])}
    figure = plots.panels({"": {"series": series, "x": "x", "y": "y", "spread": spread, "labels": "line"}}, "")
    figure.draw_without_rendering()
    (axes,), boxes = figure.axes, [text.get_window_extent() for text in figure.axes[0].texts]
    assert [text.get_text() for text in axes.texts] == ["point", *map(str, range(6))]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(figure.bbox.x1 >= box.x1 > axes.bbox.x0 and box.y0 >= axes.bbox.y0 for box in boxes)
    assert [text.get_color() for text in axes.texts[1:]] == [line.get_color() for line in axes.lines[:6]]
    assert axes.collections[1].get_datalim(axes.transData).intervaly.tolist() == [1, 5]
    assert not figure.get_suptitle() and axes.get_legend() is None


def test_panels_give_a_name_one_color():
    panel = {"x": "x", "y": "y"}
    both, second = (panel | {"series": {name: ([1], [1]) for name in names}} for names in ("ab", "b"))
    one, two = plots.panels({"one": both, "two": second}, "Two").axes
    assert one.lines[1].get_color() == two.lines[0].get_color()


def test_names_are_not_parsed_as_formulas(tmp_path):
    names = [r"$\frac$", "a$b_$c", r"\$$x"]
    panel = {"series": {name: ([1, 2], [1, 10_000]) for name in names}, "x": "x", "y": "y", "log": "y"}
    curves = plots.panels(dict.fromkeys(names, panel), names[0])
    for figure in (curves, plots.weights(np.eye(3), names[0], queries=names, keys=names)):
        figure.savefig(tmp_path / "figure.png")
        formulas = [text.get_text() for text in figure.findobj(Text) if text.get_parse_math()]
        assert not set(names) & set(formulas)
        assert figure is not curves or any(text.startswith("$\\mathdefault{10^") for text in formulas)  # unlike ticks


def test_masks_are_drawn_as_visible_pairs_and_long_titles_are_wrapped():
    masks = {"causal": Causal(), "window": SlidingWindow(left=1), "none": np.ones((4, 4))}
    figure = plots.masks(masks, "word " * 40, length=4)
    shown = [np.asarray(axes.images[0].get_array()) for axes in figure.axes]
    np.testing.assert_array_equal(shown[0], np.tri(4))
    np.testing.assert_array_equal(shown[2], np.ones((4, 4)))
    assert "\n" in figure.get_suptitle()


def test_atlas_has_a_row_per_layer_and_a_column_per_head():
    layers = [np.zeros((2, 4, 4)), np.ones((3, 4, 4))]
    (axes, _) = plots.atlas(layers, "Two layers", causal=True).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 0", "layer 1"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["head 0", "head 1", "head 2"]
    shown = np.asarray(axes.images[0].get_array().filled(np.nan))
    assert shown.shape == (4 + 1 + 4, 4 + 1 + 4 + 1 + 4)
    np.testing.assert_array_equal(shown[:4, :4], np.where(np.tri(4), 0, np.nan))
    np.testing.assert_array_equal(shown[5:, 10:], np.where(np.tri(4), 1, np.nan))
    assert np.isnan(shown[:4, 10:]).all(), "the first layer has no third head"


def test_atlas_of_long_sequences_shows_the_largest_weight_of_each_block():
    weights = np.zeros((1, 1, 1000, 2000))
    weights[0, 0, 501, 1999] = 1
    shown = plots.atlas(weights, "One weight in two million").axes[0].images[0].get_array()
    assert shown.shape == (plots.THUMBNAIL, plots.THUMBNAIL)
    assert np.argwhere(shown.filled(0) == 1).tolist() == [[32, 63]]


def test_effects_grid_has_numbers_and_is_white_at_zero():
    values = [[0.5, -0.25], [0.0, np.nan]]
    axes = plots.effects_grid(values, "Head 1 helps", layers=["first", "second"], label="change (nats)").axes[0]
    assert [text.get_text() for text in axes.texts] == ["0.50", "−0.25", "0.00"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]
    image = axes.images[0]
    assert image.get_clim() == (-0.5, 0.5)
    assert min(image.to_rgba(0.0)) > 0.95
    assert plots.effects_grid([[0.5, 2.0]], "Both help").axes[0].images[0].get_clim() == (0, 2)
