"""Variants from the command line and from files, and matching their sizes."""

import contextlib
import re

import numpy as np
import pytest

from attnlab.comparing.variants import matched, of_values, parse, size
from attnlab.config import RunConfig, words
from attnlab.masks import BlockSparse, SlidingWindow
from attnlab.nn import AttentionConfig, LayerConfig, MultiHeadAttention
from attnlab.score_mods import ScoreFn
from attnlab.support.errors import UserError
from attnlab.sweeping import grid, training_runs

BASE = RunConfig()


def configs_of(variants, base=BASE):
    """The configs of variants by name."""
    return {variant.name: variant.config(base) for variant in of_values(variants)}


def test_variants_from_a_file_are_texts_or_values_and_come_last(tmp_path):
    file = tmp_path / "mine.py"
    one = "model.width=16 model.attention.sinks=True"
    values = "{'three': SlidingWindow(3), 'four': lambda config: config.changed({'model.width': 32})}"
    file.write_text(
        "from attnlab.masks import SlidingWindow\n"
        f"VARIANTS = {{'one': '{one}', 'two': {{'init_from': '/my runs/a', 'model.width': '32'}}}} | {values}"
    )
    parsed = configs_of(parse(["zero:"], str(file)))
    assert list(parsed) == ["zero", "one", "two", "three", "four"] and parsed["zero"] == BASE
    assert words(parsed["one"], BASE) == ["--config.model.width=16", "--config.model.attention.sinks=True"]
    assert words(parsed["two"], BASE) == ["--config.init_from=/my runs/a", "--config.model.width=32"]
    assert (
        parsed["three"].model.layers == (AttentionConfig(mask=SlidingWindow(3)),) and parsed["four"].model.width == 32
    )
    assert list(parse([], "compare_positions"))[:2] == ["rotary", "alibi"]


class Window(LayerConfig, of=MultiHeadAttention, kind="window"):
    """A user-defined config with a field that is not an option."""

    reach: int = 3


def test_python_values_become_the_layers_of_variants():
    def near(score, b, h, i, j):
        return score - 0.1 * (i - j)

    attention, windows = AttentionConfig(mask=SlidingWindow(1)), (AttentionConfig(window=16), AttentionConfig())
    values = {"a": attention, "b": SlidingWindow(left=4), "c": ScoreFn(near), "d": windows, "e": Window(reach=4)}
    layers = {name: config.model.layers for name, config in configs_of(values).items()}
    assert layers["a"] == (attention,) and layers["d"] == windows and layers["e"] == (Window(reach=4),)
    assert layers["b"] == (AttentionConfig(mask=SlidingWindow(4)),) and layers["c"][0].score_mod == (ScoreFn(near),)


def test_variants_that_differ_only_in_an_array_are_two_programs():
    blocks, center = np.ones((40, 40), bool), np.arange(1600).reshape(40, 40) == 820
    points = grid.of_configs(
        [BASE.changed({"model.layers": BlockSparse(blocks ^ (center & bool(n)), 8), "seed": 3}) for n in (0, 1)]
    )
    assert repr(points[0].config) == repr(points[1].config)  # because NumPy abbreviates large arrays
    assert len(list(training_runs._groups(points, 1))) == 2 and points[0].name != points[1].name


def test_function_that_fails_or_returns_no_config_raises_one_line():
    for function, message in (
        (lambda config: config.modl, "AttributeError: "),
        (lambda config: 3, "its function retu"),
    ):
        with pytest.raises(UserError, match=f"^variant 'b': {message}"):
            configs_of({"a": {}, "b": function})


def test_two_classes_with_one_name_are_refused():
    a, b = (type("Mine", (MultiHeadAttention,), {}) for _ in range(2))
    with pytest.raises(UserError, match="two layer classes are named Mine"):
        of_values({"a": a, "b": b})


def test_two_classes_with_one_kind_are_refused():
    class Other(LayerConfig, of=MultiHeadAttention, kind="window"):
        pass

    named = type("window", (MultiHeadAttention,), {})
    for a, b in ((Window(), Other()), (Window, Other), (Window(), named)):
        with pytest.raises(UserError, match="two layer classes are named window: rename one"):
            of_values({"a": a, "b": b})


@pytest.mark.parametrize("field", ["steps=8", "batch_size=2", "model.context=8", "data.path=a.txt", "eval.windows=4"])
def test_variant_that_changes_the_tokens_is_refused(field):
    with pytest.raises(UserError, match=f"variant 'b': config.{field.partition('=')[0]} must be equal in all variants"):
        configs_of({"a": "", "b": field})


def test_folder_names_differ_if_variant_names_differ():
    folders = {grid.name_of({"variant": name}) for name in ("a b", "a_b", "a/b", "a", "é" * 200, "é" * 201)}
    assert len(folders) == 6 and all("/" not in folder and len(folder) < 160 for folder in folders)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["alibi"], 'expected "NAME: FIELD=VALUE FIELD=VALUE"'),
        ([": seed=3"], 'expected "NAME: FIELD=VALUE FIELD=VALUE"'),
        (["a: model.widht=3"], "variant 'a': config.model.widht .*did you mean model.width"),
        (["a: model.width"], "variant 'a': model.width: expected FIELD=VALUE"),
        (["a: seed=3", "b:"], "variant 'a': the comparison chooses config.seed"),
        (["a: model.mlp='gated"], "variant 'a': .*No closing quotation"),
        (["a:", "a: model.width=3"], "--variant='a' is given twice"),
        (["a:"], "one variant: .*--variant"),
    ],
)
def test_mistake_in_a_variant_is_named(given, message):
    with pytest.raises(UserError) as error:
        configs_of(parse(given, None))
    assert re.search(message, str(error.value))


@pytest.mark.parametrize(
    ("content", "message"),
    [("1 +", "SyntaxError"), ("VARIANTS = 3", "VARIANTS is not a dictionary"), ("", "has no dictionary VARIANTS")],
)
def test_file_without_variants_raises_one_line(tmp_path, content, message):
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        parse([], str(tmp_path / "mine.py"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("of", ["parameters", "flops"])
def test_feed_forward_sizes_match_variants_at_the_same_width(of):
    base = BASE.changed({"model.width": 64, "model.num_layers": 2})
    variants = of_values({"plain": {}, "gated": {"model.mlp": "gated"}, "shallow": {"model.num_layers": 1}})
    plain, gated, shallow = matched(variants, base, 65, of)
    wanted = size(base, 65, of)
    assert plain == variants[0]
    for variant in (gated, shallow):
        model = variant.config(base).model
        assert variant.comparable and (model.width, model.hidden) != (64, 256) and model.width == 64

        def distance(hidden, variant=variant):
            config = variant.config(base).changed({"model.mlp_ratio": hidden / 64})
            return abs(size(config, 65, of) - wanted)

        assert distance(model.hidden) <= min(distance(model.hidden - 1), distance(model.hidden + 1))
        assert distance(model.hidden) <= 0.02 * wanted


def test_width_matches_state_sizes_and_keeps_whole_heads():
    base = BASE.changed({"model.width": 64, "model.num_layers": 2})
    variants = of_values({"plain": {}, "shallow": {"model.num_layers": 1}})
    config = matched(variants, base, 65, "state")[1].config(base)
    assert config.model.width == 128 and size(config, 65, "state") == pytest.approx(size(base, 65, "state"), rel=0.05)


@pytest.mark.parametrize(
    "head_dim, message", [(8, "'fixed': state = [0-9,]+ at width .*: no width makes it"), (32, "")]
)
def test_width_is_not_changed_where_the_state_does_not_depend_on_it(head_dim, message):
    base = BASE.changed({"precision": "float32", "model.num_layers": 2, "model.context": 64})
    variants = of_values({"one": {}, "fixed": {"model.attention.head_dim": head_dim}})
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        assert matched(variants, base, 65, "state")[1].config(base).model.width == 128


def test_variant_that_cannot_match_in_size_is_not_comparable():
    base = BASE.changed({"model.width": 16, "model.num_layers": 1})
    variants = of_values({"one": {}, "deep": {"model.num_layers": 9}})  # too large even without feed-forward layers
    assert not matched(variants, base, 65, "parameters")[1].comparable
