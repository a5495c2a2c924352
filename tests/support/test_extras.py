"""A missing extra is reported in one line with the command to install it; the main job needs no extra."""

import subprocess
import sys

import pytest

from attnlab.data import corpora, tokenizers
from attnlab.support import extras
from attnlab.support.errors import UserError

MAIN_JOB = """
import sys
import attnlab.compare, attnlab.sample, attnlab.train
from attnlab.data import corpora, store, tokenizers
corpus = corpora.load("python_docs")
tokenizer = tokenizers.make("char", "", characters=corpus.alphabet)
store.load(corpus, tokenizer, folder=sys.argv[1])
extras = {"tensorflow_datasets", "array_record", "grain", "tokenizers", "pyarrow", "importlib_resources"}
print(*(extras | {"safetensors", "tensorboardX", "matplotlib"}) & set(sys.modules))
"""


@pytest.mark.slow
def test_characters_of_python_docs_need_no_extra(tmp_path):
    command = [sys.executable, "-c", MAIN_JOB, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize(
    "library, use, line",
    [
        ("tensorflow_datasets", lambda: corpora.load("tfds:x"), "tfds:x needs tensorflow_datasets"),
        ("array_record", lambda: corpora.load("quijote"), "quijote needs array_record"),
        ("tokenizers", lambda: tokenizers.make("bpe", "abc"), "data.tokenizer = 'bpe' needs tokenizers"),
        ("tokenizers", lambda: tokenizers.from_dict({"kind": "word"}), "a tokenizer of kind 'word' needs tokenizers"),
    ],
)
def test_missing_library_names_the_extra(library, use, line, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError) as error:
        use()
    assert str(error.value) == f"{line}: pip install 'attnlab[data]'"


def test_missing_module_of_a_library_is_named(tmp_path, monkeypatch):
    (tmp_path / "incomplete_library.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="a figure needs no_such_module: pip install 'attnlab.plots.'"):
        extras.require("incomplete_library", "plots", "a figure")
