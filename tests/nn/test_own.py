"""Parts of the user's: found by name where their file was run, and never run by a name alone."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from attnlab.nn import GPT, own, register
from attnlab.nn.kinds import KINDS, Attention, Mixer, named
from attnlab.support.errors import UserError
from tests.nn.user_parts import SOURCE, Doubling
from tests.parameters import parameters

TOKENS = np.arange(8).reshape(1, 8) % 5


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """A registry of each test's own."""
    monkeypatch.setattr(own, "_PARTS", {})
    monkeypatch.setattr(own, "_OFFERED", {})


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    "name, kind", [("Average", Mixer), ("near", Attention), ("odd", Attention), ("Shifted", Attention)]
)
def test_part_of_a_file_is_a_kind_of_layer_also_in_a_pattern(file, name, kind):
    word = register(f"{file}:{name}")
    assert isinstance(named(word), kind)
    for fields in ({"mixer": word}, {"pattern": f"gru {word}"}):
        model = GPT(5, 2, 2, 8, 8, positions="auto", **fields)
        shape = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
        assert jax.eval_shape(model.apply, shape, TOKENS).shape == (1, 8, 5)


def test_score_mod_and_mask_of_a_file_change_what_attention_computes(file):
    base = GPT(5, 1, 2, 8, 8, positions="auto", mixer="attention")
    params = parameters(base, TOKENS)
    models = [base, *(base.clone(mixer=register(f"{file}:{name}")) for name in ("near", "odd"))]
    logits = jax.jit(lambda params: [model.apply(params, TOKENS) for model in models])(params)
    assert len({np.asarray(x).tobytes() for x in logits}) == 3


def test_class_that_is_imported_is_a_part_of_its_file():
    word = register(Doubling)
    assert word.endswith("user_parts.py:Doubling") and named(word).layer is Doubling
    with pytest.raises(UserError, match="is not a class of a file"):
        register(int)
    with pytest.raises(
        UserError, match=r"Doubling\(…\) is passed: pass a class, or the name of a value, 'FILE.py:NAME'"
    ):
        register(Doubling())


@pytest.mark.parametrize(
    "word, message",
    [
        ("{file}:nothing", "has no 'nothing': it has near, odd, Average, Needy, Reader, Shifted"),
        ("{file}:jnp", "is of type module: expected a subclass of attnlab.nn.CausalMixer"),
        ("{file}:Needy", "Needy: its field order has no default: give it one"),
        ("{file}:Reader", "reads = 'key_dim': expected a set of the names conv, gate, heads"),
        ("{file}x.py:near", "No such file or directory: expected a Python file"),
        ("near", "'near' is not a part: expected FILE.py:NAME, without spaces"),
    ],
)
def test_name_that_is_no_part_raises_one_line(file, word, message):
    with pytest.raises(UserError, match=message):
        register(word.format(file=file))


def test_file_that_fails_raises_one_line(tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    with pytest.raises(UserError, match=r"broken.py failed \(SystemExit: 3\)"):
        register(f"{tmp_path}/broken.py:Mine")


def test_name_alone_runs_nothing(tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    model = GPT(5, 1, 2, 8, 8, positions="auto", mixer=f"{tmp_path}/evil.py:Mine")
    with pytest.raises(ValueError, match="names code, which has not been run"):
        model.init(jax.random.key(0), TOKENS)
    for offered in ((), (tmp_path / "other.py",)):
        for path in offered:
            path.write_text(SOURCE)
            own.offer(str(path))
        with pytest.raises(
            UserError, match="runs/x names code, which runs only if you name its file: --mixer=/a/evil.py"
        ):
            own.admit({"/a/evil.py:Mine": "0" * 64}, "runs/x")
    assert not (tmp_path / "ran").exists()


def test_saved_names_are_admitted_by_the_content_of_an_offered_or_registered_file(file, tmp_path):
    word = register(f"{file}:near")
    digest = own.sources(GPT(5, 1, 2, 8, 8, mixer=word))[word]
    own.admit({"/elsewhere/mine.py:near": digest}, "runs/x")
    assert own.part_of("/elsewhere/mine.py:near") is own.part_of(word)
    own.offer(str(file))
    own.admit({"/elsewhere/mine.py:odd": digest}, "runs/x")
    own.check_offered_used()
    file.write_text(SOURCE + "\n# changed")
    with pytest.raises(UserError, match="has changed since it was registered: restart Python"):
        register(f"{file}:near")
    own._PARTS.clear()
    register(f"{file}:near")
    with pytest.raises(UserError, match="has changed since runs/x began .* restore it, or choose a new --workdir"):
        own.admit({word: digest}, "runs/x")


def test_path_below_a_folder_with_a_space_raises_one_line(tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path / "a b")
    with pytest.raises(UserError, match="has a space, which separates the words of a pattern: move or link the file"):
        register("mine.py:near")


def test_offered_file_that_no_run_names_is_an_error(file):
    own.offer(str(file))
    with pytest.raises(UserError, match="the run names no code of this content: leave it out"):
        own.check_offered_used()


@pytest.mark.slow
def test_part_is_found_after_import_in_a_new_process(file):
    code = f"from attnlab.nn import GPT, register; print(GPT(5, 1, 2, 8, 8, mixer=register('{file}:near')).mixer)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == f"{file}:near"


def test_table_of_kinds_does_not_grow(file):
    before = set(KINDS)
    register(f"{file}:near")
    assert set(KINDS) == before
