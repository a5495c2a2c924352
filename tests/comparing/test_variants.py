"""Variants from a command line and from files, and widths that match in size."""

import contextlib
import re

import pytest

from attnlab import config as configs
from attnlab.comparing.variants import Variant, config_of, matched, of_values, parse, size
from attnlab.masks import SlidingWindow
from attnlab.nn import AttentionConfig, LayerConfig, ModelConfig, MultiHeadAttention
from attnlab.nn.multihead import LocalConfig
from attnlab.score_mods import ScoreFn, SoftCap
from attnlab.support.errors import UserError
from attnlab.sweeping import grid
from attnlab.training import run

OPTIONS = ("--config=quickstart",)


def test_variants_of_a_file_are_texts_or_dictionaries_and_come_after_those_of_the_command(tmp_path):
    file = tmp_path / "mine.py"
    one = "model.width=16 model.attention.sinks=True"
    file.write_text(f"VARIANTS = {{'one': '{one}', 'two': {{'init_from': '/my runs/a'}}}}")
    assert of_values(parse(["zero:"], str(file))) == [
        Variant("zero"),
        Variant("one", ("--config.model.width=16", "--config.model.attention.sinks=True")),
        Variant("two", ("--config.init_from=/my runs/a",)),
    ]
    assert list(parse([], "compare_positions"))[:2] == ["rotary", "alibi"]


def test_python_values_make_variants_whose_kinds_are_those_of_the_values():
    def near(score, b, h, i, j):
        return score - 0.1 * (i - j)

    values = {"a": AttentionConfig(window=4), "b": SlidingWindow(left=4), "c": ScoreFn(near)}
    a, b, c = of_values(values)
    assert a == Variant("a", ("--config.model.layers=attention", "--config.model.attention.window=4"))
    kind, other = (each.options[0].removeprefix("--config.model.layers=") for each in (b, c))
    assert (kind, other) == ("own_b", "own_c")
    assert config_of((*OPTIONS, *b.options)).model.layers[0].kind == kind


def test_two_classes_of_one_name_and_python_values_for_the_command_are_refused(tmp_path):
    a, b = (type("Mine", (MultiHeadAttention,), {}) for _ in range(2))
    with pytest.raises(UserError, match="two classes of layers are named Mine"):
        of_values({"a": a, "b": b})
    file = tmp_path / "mine.py"
    file.write_text("from attnlab.masks import Causal\nVARIANTS = {'a': {}, 'b': {'model.layers': Causal()}}")
    with pytest.raises(UserError, match="variant 'b' is a value of Python, and the command takes fields"):
        parse([], str(file))


class Window(LayerConfig, of=MultiHeadAttention, kind="window"):
    """A user's config with a field that is no option."""

    reach: int = 3


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            AttentionConfig(mask=SlidingWindow(left=1)),
            "attention.mask is a SlidingWindow, which .* cannot hold: .*itself",
        ),
        (LocalConfig(window=4, score_mod=SoftCap(2.0)), "local.score_mod is a SoftCap, which .* cannot hold: .*itself"),
        (Window(reach=4), "window.reach is a int, which .* cannot hold: make it an option"),
    ],
)
def test_config_of_which_a_run_would_lose_a_part_is_refused(layer, message):  # until configs are values
    with pytest.raises(UserError, match=message):
        of_values({"a": {}, "b": layer})
    for use in (configs.to_json, lambda config: config.changed({}), run.resolve):
        with pytest.raises(UserError, match=message):
            use(configs.RunConfig(model=ModelConfig(layers=(layer,))))


def test_layers_of_one_kind_with_different_options_are_refused():  # until configs are values
    layers = AttentionConfig(window=4), AttentionConfig()
    with pytest.raises(UserError, match="layers of the kind attention have different options, which .* cannot hold"):
        run.resolve(configs.RunConfig(model=ModelConfig(layers=layers)))


def test_two_classes_of_one_kind_are_refused():
    class Other(LayerConfig, of=MultiHeadAttention, kind="window"):
        pass

    named = type("window", (MultiHeadAttention,), {})
    for a, b in ((Window(), Other()), (Window, Other), (Window(), named)):
        with pytest.raises(UserError, match="two classes of layers are named window: rename one"):
            of_values({"a": a, "b": b})


@pytest.mark.parametrize("field", ["steps=8", "batch_size=2", "model.context=8", "data.path=a.txt", "eval.windows=4"])
def test_variant_that_would_see_other_tokens_is_refused(field):
    with pytest.raises(
        UserError, match=f"variant 'b': config.{field.partition('=')[0]}: all variants have it in common"
    ):
        of_values({"a": "", "b": field})


def test_names_of_folders_differ_where_names_do():
    folders = {grid.name_of({"variant": name}) for name in ("a b", "a_b", "a/b", "a", "é" * 200, "é" * 201)}
    assert len(folders) == 6 and all("/" not in folder and len(folder) < 160 for folder in folders)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["alibi"], 'expected "NAME: FIELD=VALUE FIELD=VALUE"'),
        ([": seed=3"], 'expected "NAME: FIELD=VALUE FIELD=VALUE"'),
        (["a: model.widht=3"], "variant 'a': config.model.widht .*did you mean model.width"),
        (["a: model.width"], "variant 'a': model.width: expected FIELD=VALUE"),
        (["a: seed=3"], "variant 'a': config.seed is chosen"),
        (["a: model.mlp='gated"], "variant 'a': .*No closing quotation"),
        (["a:", "a: model.width=3"], "--variant='a' is there twice"),
        (["a:"], "one variant: .*--variant"),
    ],
)
def test_mistake_in_a_variant_is_named(given, message):
    with pytest.raises(UserError) as error:
        of_values(parse(given, None))
    assert re.search(message, str(error.value))


@pytest.mark.parametrize(
    ("content", "message"),
    [("1 +", "SyntaxError"), ("VARIANTS = 3", "VARIANTS is not a dictionary"), ("", "has no dictionary VARIANTS")],
)
def test_file_without_variants_is_one_line(tmp_path, content, message):
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        parse([], str(tmp_path / "mine.py"))
    assert "\n" not in str(error.value)


def test_matched_widths_are_the_nearest_that_keep_heads_whole():
    options, of = (*OPTIONS, "--config.model.width=64", "--config.model.num_layers=2"), "flops"
    shallow = Variant("shallow", ("--config.model.num_layers=1",))
    given = [Variant("plain"), Variant("gated", ("--config.model.mlp=gated",)), shallow]
    plain, gated, shallow = matched(given, options, 65, of)
    assert plain == given[0] and gated.comparable
    wanted = size(config_of(options), 65, of)
    for variant in (gated, shallow):
        config = config_of([*options, *variant.options])
        found, step = config.model.width, 2 * config.model.num_heads
        assert found % step == 0 and found != 64

        def distance(width, config=config):
            return abs(size(config.changed({"model.width": width}), 65, of) - wanted)

        assert distance(found) <= min(distance(found - step), distance(found + step))
        assert variant.comparable == (distance(found) <= 0.05 * wanted)


@pytest.mark.parametrize("head_dim, message", [(8, "'fixed' has [0-9,]+ at width .*: no width makes it"), (32, "")])
def test_width_is_not_changed_where_the_state_does_not_depend_on_it(head_dim, message):
    options = (*OPTIONS, "--config.precision=float32", "--config.model.num_layers=2", "--config.model.context=64")
    variants = [Variant("one"), Variant("fixed", (f"--config.model.attention.head_dim={head_dim}",))]
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        assert matched(variants, options, 65, "state")[1].options[-1] == "--config.model.width=128"


def test_variant_that_no_width_makes_as_large_is_not_comparable():
    options = (*OPTIONS, "--config.model.width=16", "--config.model.num_layers=1")
    heads = Variant("heads", ("--config.model.num_heads=8", "--config.model.num_layers=2"))
    _, found = matched([Variant("one"), heads], options, 65, "parameters")
    assert not found.comparable
