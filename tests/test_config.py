"""A config keeps every value when another field changes, and through JSON, processes and run folders."""

import dataclasses
import json
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab import config as configs
from attnlab import masks, score_mods
from attnlab.config import RunConfig
from attnlab.data import tokenizers
from attnlab.nn import AttentionConfig, LayerConfig, ModelConfig, MultiHeadAttention, custom, records
from attnlab.nn.config import KINDS
from attnlab.nn.multihead import LocalConfig
from attnlab.support.errors import UserError
from attnlab.sweeping import grid, together
from attnlab.training.workdir import Workdir, read_run
from tests.nn.user_parts import SOURCE

pytestmark = pytest.mark.usefixtures("registry")


class Reaching(LayerConfig, of=MultiHeadAttention, kind="Reaching"):
    """A user-defined config with fields that are not options."""

    reach: tuple[int, ...] = (3,)
    mask: object = None


@dataclasses.dataclass(frozen=True)
class First(masks.Mask):
    """A user-defined mask: only the first keys."""

    count: int

    def visible(self, tile):
        return tile.kv_index < self.count


def strided(b, h, i, j, stride):
    return (i - j) % stride == 0


def near(score, b, h, i, j):
    return score - 0.1 * (i - j)


SMALL = st.integers(1, 9)
BITS = st.lists(st.booleans(), min_size=4, max_size=4).map(lambda bits: np.array(bits).reshape(2, 2))
FLOATS = st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4).map(lambda x: np.array(x, np.float32))
MASKS = st.recursive(
    st.builds(masks.Causal)
    | st.builds(masks.SlidingWindow, SMALL, SMALL)
    | st.builds(masks.PrefixLM, SMALL)
    | st.builds(masks.BlockSparse, BITS, SMALL)
    | st.builds(masks.Dense, BITS)
    | st.builds(lambda stride: masks.MaskFn(strided, np.int32(stride).reshape(())), SMALL)
    | st.builds(First, SMALL),
    lambda inner: inner.map(lambda x: ~x) | st.builds(masks.And, inner, inner) | st.builds(masks.Or, inner, inner),
    max_leaves=4,
)
MODS = st.builds(score_mods.SoftCap, st.floats(1, 50)) | st.builds(score_mods.ALiBi, FLOATS)
MODS |= st.sampled_from([score_mods.ScoreFn(near), score_mods.ALiBi(jnp.ones(4))]) | FLOATS.map(
    lambda x: score_mods.RelativeBias(x.reshape(4, 1))
)
PARTS = {"mask": st.none() | MASKS, "score_mod": st.none() | MODS | st.tuples(MODS, MODS)}
WINDOW = st.none() | SMALL
LAYERS = (  # classes and their options
    st.tuples(st.just(AttentionConfig), st.fixed_dictionaries({"window": WINDOW, "sinks": st.booleans()} | PARTS))
    | st.tuples(st.just(LocalConfig), st.fixed_dictionaries({"window": SMALL} | PARTS))
    | st.tuples(st.just(Reaching), st.fixed_dictionaries({"reach": st.tuples(SMALL, SMALL), "mask": st.none() | MASKS}))
    | st.tuples(st.just(KINDS["gated_delta"]), st.fixed_dictionaries({"conv": SMALL}))
    | st.just((KINDS["gru"], {}))
)
FIELDS = st.fixed_dictionaries(
    {"steps": SMALL, "seed": SMALL, "data.mixture": st.sampled_from(["", "quijote=3, notes/*.txt=1"])},
    optional={
        "precision": st.sampled_from(["bfloat16", "tf32"]), "init_from": st.just("runs/a b"),
        "model.scan": st.booleans(), "model.vocab_size": st.integers(9, 99), "model.width": st.sampled_from([32, 64]),
    },
)  # fmt: skip


def again(config):
    """The config as another process or a restart reads it from its JSON."""
    return configs.from_json(json.loads(configs.to_json(config)), records.arrays_of(config.model.layers))


@settings(max_examples=60, deadline=None)
@given(st.lists(LAYERS, min_size=1, max_size=4), FIELDS)
def test_config_survives_changes_and_json(layers, fields):
    layers = [kind(**options) for kind, options in layers]
    config = RunConfig.of(fields | {"model.layers": layers})
    assert again(config) == config and hash(again(config)) == hash(config) and not again(config).difference(config)
    assert config.changed({}) == config == RunConfig.of(config.fields)
    assert config.changed({"eval.every": 7, "seed": 5}).model is config.model
    assert config.changed({"model.num_layers": 6}).model.layers == config.model.layers == tuple(layers)


def off_default(each, value):
    """Another valid value of an option."""
    if bool in each.types:
        return not value
    if each.choices:
        return next(choice for choice in each.choices if choice != value)
    low, high = each.low if each.low is not None else -9, each.high if each.high is not None else 2**31 - 1
    candidates = [2 * value, value / 2, value + 1] if value else [1, 4, 0.5, low]
    plain = [int(x) if int in each.types else float(x) for x in candidates]
    return next(x for x in plain if low <= x <= high and x != value)


TEXTS = {
    "data.name": "quijote", "data.path": "a/b.txt", "data.feature": "text", "data.mixture": "a=1, b=2",
    "data.store": "x", "init_from": "runs/a", "checkpoint.dir": "gs://bucket/a", "log.profile": "2:3",
}  # fmt: skip
WITH = {"model.mlp_ratio": {}, "model.num_heads": {"model.width": 192}, "model.local.window": {"model.local.window": 8}}


@pytest.mark.parametrize("group", dict.fromkeys(name.rpartition(".")[0] for name in configs.declared()))
def test_every_field_off_its_default_survives(group):
    for name, each in configs.declared().items():
        if name.rpartition(".")[0] != group or name == "model.layers":
            continue
        kind = name.split(".")[1] if name.split(".")[1:2] and name.split(".")[1] in KINDS else None
        base = {"model.layers": kind} | ({"model.local.window": 8} if kind == "local" else {}) if kind else {}
        value = TEXTS[name] if name in TEXTS else off_default(each, each.default)
        try:
            config = RunConfig.of(base | {name: value})
        except UserError as error:  # conflicts with the default of another field: only sizes of heads do
            assert re.search(
                "heads|head_dim|width|features|qk_norm|divisor|multiple|even|rotary.scaling", str(error)
            ), error
            continue
        assert config.fields[name] != configs.RunConfig.of(base).fields[name], name
        assert again(config) == config == config.changed({}) and again(config).fields[name] == config.fields[name], name


def with_parts(file):
    """A config with an array, and with layers, masks and functions from a file."""
    custom.import_file(file)
    (module,) = (module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == str(file))
    mask = ~masks.PrefixLM(2) & masks.Dense(np.eye(8, dtype=bool))
    layers = AttentionConfig(window=16), AttentionConfig(mask=mask, score_mod=score_mods.ScoreFn(module.near))
    return RunConfig.of({"model.layers": (*layers, KINDS["Average"](decay=0.5)), "seed": 3})


def test_config_survives_another_process_and_a_run_folder(tmp_path):
    (file := tmp_path / "mine.py").write_text(SOURCE)
    config = with_parts(file)
    together.write({"one": config, "two": config.changed({"seed": 4})}, tmp_path / "runs.json")
    read = "from attnlab.sweeping import together; from attnlab import config; from pathlib import Path; import sys\n"
    read += "print(*(config.to_json(x) for x in together._read(Path(sys.argv[1])).values()), sep='---')"
    command = [sys.executable, "-c", read, str(tmp_path / "runs.json")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [json.loads(text)["seed"] for text in out.split("---")] == [3, 4]
    assert json.loads(out.split("---")[0]) == json.loads(configs.to_json(config))

    corpus = {"name": "text", "sha256": "0" * 64, "characters": 1}
    (folder := tmp_path / "run").mkdir()
    Workdir(folder).create(configs.to_json(config, corpus=corpus), config, tokenizers.make("byte", ""))
    assert read_run(folder)[1] == config == Workdir(folder).config
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "config.npz", "source", "tokenizer.json"]
    (folder / "config.npz").unlink()
    with pytest.raises(UserError, match="config.json is damaged .the array .* is missing"):
        read_run(folder)


def test_process_local_function_is_refused_in_one_line(tmp_path):
    local = RunConfig.of({"model.layers": AttentionConfig(score_mod=lambda score, b, h, i, j: score)})
    with pytest.raises(UserError, match="<lambda> exists only in this process, but jobs are separate processes"):
        together.write({"one": local}, tmp_path / "runs.json")
    text = configs.to_json(local)
    assert configs.from_json(json.loads(text)) == local  # while the function exists
    read = configs.from_json(json.loads(text.replace('"version": "', '"version": "0')))
    assert not read.difference(local) and configs.to_json(read) == text.replace('"version": "', '"version": "0')
    with pytest.raises(UserError, match="the run's layers use .*<lambda>, which this process lacks: .*pass it again"):
        custom.code(read.model)


def test_saved_names_cannot_run_other_code():
    record = {"class": {"name": "system", "module": "os", "file": ""}, "command": "false"}
    assert isinstance(records.value_of(record, {}), records.Absent)
    record = {
        "class": "ScoreFn",
        "fn": {"function": {"name": "Popen", "module": "subprocess", "file": ""}},
        "arrays": [],
    }
    assert isinstance(records.value_of(record, {}), records.Absent)


def test_function_hidden_by_a_later_one_is_not_sent_to_processes(tmp_path):
    """A loop defines several functions with one name; afterwards the name refers only to the last function."""
    text = "MODS = []\nfor slope in (0.1, 0.2):\n    def near(score, b, h, i, j, slope=slope):\n"
    (file := tmp_path / "mine.py").write_text(f"{text}        return score - slope * (i - j)\n    MODS.append(near)\n")
    first, last = custom.run(file).MODS
    one, two = (RunConfig.of({"model.layers": score_mods.ScoreFn(mod)}) for mod in (first, last))
    together.write({"two": two}, tmp_path / "runs.json")
    with pytest.raises(UserError, match="^near exists only in this process"):
        together.write({"one": one}, tmp_path / "runs.json")
    assert again(one) == one and again(two) == two and not one.difference(two)  # the functions' versions alone differ
    assert len({point.name for point in grid.of_configs([one, two])}) == 2


def test_local_definitions_survive_json_within_their_process():
    @dataclasses.dataclass(frozen=True)
    class Local(masks.Mask):
        fn: object
        function: object = None
        factor: object = np.float64(2.0)
        derived: int = dataclasses.field(init=False, default=0)

    config = RunConfig.of({"model.layers": Local(lambda tile: tile)})
    assert again(config) == config and custom.code(config.model)
    assert type(again(config).model.layers[0].mask.factor) is np.float64
    weighted = score_mods.ScoreFn(lambda score, b, h, i, j, weight: weight * score, 2.0)
    config = RunConfig.of({"model.layers": (AttentionConfig(score_mod=weighted), AttentionConfig())})
    assert again(config) == config


@pytest.mark.parametrize(
    "values, message",
    [
        ({"model.layers": "gru", "model.attention.mask": masks.Causal()}, "attention.mask = Causal.*has no attention"),
        ({"model.layers": (masks.Causal(), masks.Causal())}, "layers = .*: expected kinds or configs of layers"),
        ({"model.layers": Reaching(reach=[3])}, "model.layers = .*: expected hashable values"),
        ({"data.path": "a.txt", "data.name": "quijote"}, "data.name = 'quijote' has no effect with config.data.path"),
    ],
    ids=str,
)
def test_value_that_would_be_lost_is_an_error(values, message):
    with pytest.raises(UserError, match=message):
        RunConfig.of(values)


def test_kind_of_an_unused_layer_is_loaded_too(tmp_path):
    (file := tmp_path / "mine.py").write_text(SOURCE)
    custom.import_file(file)
    config = RunConfig.of({"model.layers": "attention Average", "model.num_layers": 1})
    assert [*custom.code(config.model)] == ["Average"] and custom.to_load([config.model]) == [(str(file), "import")]


def test_config_of_format_1_is_read():
    saved = {"format": 1, "steps": 7, "model": {"layers": "gated_delta*2 attention", "attention": {"window": 8}}}
    saved["model"] |= {"scan": True, "vocab_size": None, "gated_delta": {"conv": 2}}
    config = configs.from_json(saved)
    assert config.scan and config.steps == 7
    assert config.model.layers == (KINDS["gated_delta"](conv=2),) * 2 + (AttentionConfig(window=8),)


def test_layers_change_together_by_kind_and_singly_by_index():
    config = RunConfig.of({"model.layers": (AttentionConfig(window=16), AttentionConfig())})
    assert [layer.window for layer in config.changed({}).model.layers] == [16, None]
    assert [layer.window for layer in config.changed({"model.layers[1].window": 4}).model.layers] == [16, 4]
    assert [layer.window for layer in config.changed({"model.attention.window": 2}).model.layers] == [2, 2]
    with pytest.raises(UserError, match=r"^config.model.layers\[2\] = .*: expected layers\[0\] to layers\[1\]"):
        config.changed({"model.layers[2].window": 4})
    with pytest.raises(UserError, match="'attention gru': the layers of kind attention have different options"):
        config.changed({"model.layers": "attention gru"})
    hybrid = RunConfig.of({"model.attention.window": 16}).changed({"model.layers": "gated_delta*3 attention"})
    assert [getattr(layer, "window", 0) for layer in hybrid.model.layers] == [0, 0, 0, 16]


def test_option_of_one_layer_without_effect_is_an_error():
    config = RunConfig.of({"model.layers": "attention*2", "model.layers[1].rotary.factor": 4.0})
    with pytest.raises(
        UserError, match="^config.model.attention.rotary.factor = 4.0: it has no effect with scaling = "
    ):
        config.check_effects()


def test_width_and_heads_can_be_changed_together():
    config = RunConfig.of({"model.width": 96, "model.num_heads": 6})
    assert config.changed({"model.num_heads": 5, "model.width": 80}).model.width == 80


def test_layers_accept_masks_score_mods_classes_and_names():
    for value in (masks.SlidingWindow(3), np.eye(4, dtype=bool), score_mods.SoftCap(2.0), near, Reaching, "gru"):
        (layer,) = RunConfig.of({"model.layers": value}).model.layers
        assert isinstance(layer, LayerConfig) and KINDS[layer.kind] is type(layer)
    with pytest.raises(UserError, match="layers = 5: expected kinds or configs of layers"):
        RunConfig.of({"model.layers": 5})


def test_run_config_sets_model_dtype_and_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig(precision="bfloat16", init_from="a", model=ModelConfig(width=64))
    assert config.model.dtype == "bfloat16" and config.init_from == f"{tmp_path}/a" and config.model.vocab_size == 1
    assert RunConfig(model=ModelConfig()) == RunConfig() and hash(RunConfig(model=ModelConfig())) == hash(RunConfig())
