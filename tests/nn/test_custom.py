"""User-defined layers, score mods and masks: names are kinds once their file has run; a name alone never runs it."""

import contextlib
import linecache

import flax.linen as nn
import jax
import numpy as np
import pytest

from attnlab import config as configs
from attnlab.nn import GPT, custom, register
from attnlab.nn.config import KINDS
from attnlab.score_mods import SoftCap
from attnlab.support.errors import UserError
from attnlab.testing import check_layer
from attnlab.training import overrides
from tests.nn.user_parts import SOURCE, Doubling, forget
from tests.parameters import parameters

pytestmark = pytest.mark.usefixtures("registry")

TOKENS = np.arange(8).reshape(1, 8) % 5
SIZES = {"vocab_size": 5, "num_layers": 2, "num_heads": 2, "width": 8, "context": 8}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def code(*kinds):
    """Files of custom kinds, as a run saves them."""
    sources = custom.sources(GPT.of(**SIZES, layers=" ".join(kinds)).config.layers)
    return {kind: {"file": str(source.path)} for kind, source in sources.items()}


def test_public_definitions_of_imported_file_are_layer_kinds(file):
    assert custom.import_file(file) == custom.import_file(file) == ["odd", "near", "Running", "Average", "Shifted"]
    assert all(custom.is_custom(kind) for kind in ("near", "Shifted")) and not custom.is_custom("gru")
    for layers in ("near", "gru odd", "Average", "Shifted attention"):
        model = GPT.of(**SIZES, layers=layers)
        shape = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
        assert jax.eval_shape(model.apply, shape, TOKENS).shape == (1, 8, 5)
    assert GPT.of(**SIZES, layers="Shifted").config.position_encoding == "none"


def test_options_declared_by_custom_layer_belong_to_its_kind(file):
    custom.import_file(file)
    assert configs.default().model.Average.decay == 0.6 and KINDS["Average"].heads is None
    config = GPT.of(**SIZES, layers="Average", Average={"decay": 0.5, "heads": 1}).config
    layer = config.layers[0].make(config)
    assert (layer.decay, layer.num_heads, type(layer).__name__) == (0.5, 1, "Average")
    with pytest.raises(ValueError, match=r"^Average.decay = 2.0: expected a number from 0.01 to 1$"):
        GPT.of(**SIZES, layers="Average", Average={"decay": 2.0})


def test_score_mod_and_mask_from_file_change_attention(file):
    custom.import_file(file)
    models = [GPT.of(**SIZES | {"num_layers": 1}, layers=kind) for kind in ("attention", "near", "odd")]
    params = parameters(models[0], TOKENS)
    logits = jax.jit(lambda params: [model.apply(params, TOKENS) for model in models])(params)
    assert len({np.asarray(x).tobytes() for x in logits}) == 3


def test_registered_class_or_value_is_a_kind():
    assert register(Doubling) == register(Doubling) == "Doubling" and KINDS["Doubling"].module is Doubling
    assert register(SoftCap(5.0), "capped") == "capped" and code("Doubling", "capped")["capped"]["file"] == "."
    assert GPT.of(layers=f"{register(Doubling, 'twice')}*2 capped").config.layers[1].kernel_size == 4


def test_plain_module_decodes_by_passes_over_its_newest_inputs(file):
    custom.import_file(file)
    config = GPT.of(**SIZES, layers="Running").config
    layer, x = config.layers[0].make(config), np.random.default_rng(0).standard_normal((2, 5, 8), np.float32)
    assert layer.num_heads == 2 and check_layer(layer, features=8) == []
    params, cache = parameters(layer, x), layer.init_cache(2, 8, capacity=3)
    step = jax.jit(lambda x, cache: layer.apply(params, x, cache=cache))
    for token in np.split(x, 5, axis=1):
        out, cache = step(token, cache)
    np.testing.assert_allclose(out[:, 0], layer.apply(params, x[:, 2:])[:, -1], rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="^Running is a plain module, which takes no segments: pass None, or "):
        layer.apply(params, x, segments=np.zeros((2, 5), int))


def test_notebook_copy_has_all_that_a_class_uses_from_its_cells(tmp_path):
    names, x = {"__name__": "notebook"}, np.ones((1, 3, 4))
    cell = "class Own(Module):\n  half = staticmethod(half)\n  def __call__(self, x):\n    return fast(self.half(x))"
    cells = [
        "import jax, jax.numpy as jnp\nfrom flax.linen import Module\nscale = 2.0",
        "def half(x): return x / scale",
    ]
    for text in (*cells, "fast = jax.jit(half)\nassert fast(4) == 2", f"print(fast)\n{cell}\nassert Own.x == 5"):
        file = f"<cell {len(linecache.cache)}>"
        linecache.cache[file] = len(text), None, text.splitlines(True), file
        with contextlib.suppress(AttributeError):  # by the last line, which is not copied
            exec(compile(text, file, "exec"), names)
    (source,) = custom.sources(GPT.of(layers=register(names["Own"])).config.layers).values()
    (file := tmp_path / source.path).write_text(source.text)
    out, kinds = names["Own"]().apply({}, x), custom.import_file(file)
    assert kinds == ["Own"]
    np.testing.assert_array_equal(GPT.of(layers="Own").config.layers[0].module.plain().apply({}, x), out)


@pytest.mark.parametrize(
    "value, name, message",
    [
        (int, None, "is defined neither in a file nor in a notebook cell: define it"),
        (lambda score, b, h, i, j: score, None, "'<lambda>': expected a name such as 'mine'"),
        (nn.Dense, None, "Dense: its field features has no default: give it one"),
        (UserError, None, "UserError is the class UserError: expected a subclass of attnlab.nn.Layer or LayerConfig"),
        (SoftCap(5.0), None, r"SoftCap\(…\) needs a name: register\(value, name\)"),
        (5, "five", "five is of type int: expected a subclass"),
        (Doubling, "gru", "'gru' is a built-in kind: choose another name"),
        (SoftCap(5.0), "a b", "'a b': expected a name such as 'mine'"),
        (SoftCap(5.0), "norm", "'norm': expected a name such as 'mine' that ModelConfig does not use"),
    ],
)
def test_value_that_cannot_be_a_kind_raises_one_line(value, name, message, own_errors):
    register(Doubling)
    with pytest.raises(UserError, match=message) as raised:
        register(value, name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("raise SystemExit(3)", r"broken.py failed \(SystemExit: 3\)"),
        ("x = 1", "it defines no layer, score mod or mask"),
        ("from attnlab.nn import GRU", "it defines no layer"),
        (
            "from attnlab.nn import Layer\nclass Needy(Layer):\n  order: int",
            "Needy: its field order has no default: give",
        ),
        (None, "broken.py: No such file or directory: expected a Python file"),
    ],
)
def test_file_that_cannot_be_imported_raises_one_line(tmp_path, text, message):
    path = tmp_path / "broken.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        custom.import_file(path)


def test_saved_kind_needs_an_imported_file(file):
    custom.import_file(file)
    saved = code("near", "gru")
    custom.check_imported(saved, "runs/x")
    forget()
    with pytest.raises(ValueError, match="layers = 'near': no kind 'near'"):
        GPT.of(layers="near")
    with pytest.raises(UserError, match=f"^runs/x uses custom code, 'near': pass --import={file}, or the run's copy"):
        custom.check_imported(saved, "runs/x")


def test_config_version_changes_with_what_custom_layers_compute(file, tmp_path):
    custom.import_file(file)

    def version(kind):
        return overrides.version(configs.RunConfig.of({"model.layers": kind, "model.width": 8, "model.num_heads": 2}))

    first = version("near")
    assert len(first) == 6 and version("gru") == ""
    (copy := tmp_path / "copy.py").write_text(SOURCE.replace("0.6", "0.7") + "print(near)  # and another layer")
    custom.import_file(copy)
    assert version("near") == first
    file.write_text(SOURCE.replace("0.1 *", "0.2 *"))
    custom.import_file(file)
    assert version("near") != first


def test_imported_file_used_by_no_layer_is_an_error(file):
    custom.import_file(file)
    custom.check_used([str(file)], GPT.of(layers="gru near").config.layers)
    with pytest.raises(UserError, match=f"^--import={file}: no layer comes from it \\(layers: gru\\): set config.m"):
        custom.check_used([str(file)], GPT.of(layers="gru").config.layers)
