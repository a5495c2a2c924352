"""Digests of code: they change with what a function, class or value computes, and with nothing else."""

import ast
import importlib
import linecache
import os
import subprocess
import sys
import types

import pytest

from attnlab.nn.digests import digest
from attnlab.score_mods import ScoreFn
from attnlab.support.errors import UserError

IMPORTS = (
    "import dataclasses, enum, functools, jax, types, numpy as np, jax.numpy as jnp\n"
    "from flax import linen as nn\nfrom typing import NamedTuple"
)
OWN = """class Own(nn.Module):
    def __call__(self, x):
        return gate(x)"""
FIELD = "class Own(nn.Module):\n    scale: float = K\n    def __call__(self, x): return self.scale * x"
STATIC = "class Own(nn.Module):\n    gate = staticmethod(gate)\n    def __call__(self, x): return self.gate(x)"
DERIVED = "class Own(Base): pass"


def using(body, out):
    """A class with a line in its body, and what it computes."""
    return f"class Own(nn.Module):\n    {body}\n    def __call__(self, x): return {out}"


PROPERTY = using("@property\n    def k(self): return K", "self.k * x")
SLOTS = "class H:\n    __slots__ = 'key'\nh = H()\nh.key = "
LONG = "h = np.poly1d(np.ones(2000))\nh[1000] = "  # whose repr is cut


def helper(base, factor):
    return f"class H({base}):\n    a: int = 1\n    def f(self, x): return {factor} * x\nh = H()"


# Cells of a notebook, the last but one of which is edited before it and the last run again.
EDITS = {
    "helper": ("def gate(x): return 0 * x", "def gate(x): return 1 * x", OWN),
    "alias": ("gate = jnp.zeros_like", "gate = jnp.positive", OWN),
    "of a module": ("import math\ngate = lambda x: math.sin(1)", "import math\ngate = lambda x: math.cos(1)", OWN),
    "literal": ("gate = lambda x: K * x\nK = 0.0", "gate = lambda x: K * x\nK = 1.0", OWN),
    "array": ("W = np.zeros(2)\ngate = lambda x: W * x", "W = np.ones(2)\ngate = lambda x: W * x", OWN),
    "key": ("k = jax.random.key(0)\ngate = lambda x: k", "k = jax.random.key(1)\ngate = lambda x: k", OWN),
    "in place": ("W = np.zeros(2)\ngate = lambda x: W", "W = np.zeros(2)\nW[0] = 1\ngate = lambda x: W", OWN),
    "field": ("K = 0.0", "K = 1.0", FIELD),
    "static": ("def gate(x): return 0 * x", "def gate(x): return 1 * x", STATIC),
    "base": (OWN.replace("Own", "Base") + "\ngate = 0", OWN.replace("Own", "Base") + "\ngate = 1", DERIVED),
    "partial": ("gate = functools.partial(jnp.dot, 0)", "gate = functools.partial(jnp.dot, 1)", OWN),
    "closure": ("f = lambda k: lambda x: k * x\ngate = f(0)", "f = lambda k: lambda x: k * x\ngate = f(1)", OWN),
    "default": ("K = 0\ndef gate(x, k=K): return k", "K = 1\ndef gate(x, k=K): return k", OWN),
    "nested": ("K = 0\ngate = lambda x: jax.tree.map(lambda y: K, x)", "K = 1", OWN),
    "attribute": ("T = [0]", "T = [1]", OWN.replace("def", "table = T\n    def").replace("gate", "")),
    "jitted": ("gate = jax.jit(lambda x: 0 * x)", "gate = jax.jit(lambda x: 1 * x)", OWN),
    "vmapped": ("gate = jax.vmap(jnp.sin, 0)", "gate = jax.vmap(jnp.sin, 1)", OWN),
    "module": ("gate = nn.Dense(3)", "gate = nn.Dense(4)", OWN),
    "container": ("gates = {'a': [0]}\ngate = lambda x: gates", "gates = {'a': [1]}\ngate = lambda x: gates", OWN),
    "property": ("K = 0", "K = 1", PROPERTY),
    "cached property": ("K = 0", "K = 1", PROPERTY.replace("property", "functools.cached_property")),
    "behind a field": ("act = nn.relu", "act = nn.tanh", using("act: object = act", "self.act(x)")),
    "behind an attribute": ("act = nn.relu", "act = nn.tanh", using("act = staticmethod(act)", "self.act(x)")),
    "factory": ("k = lambda: 0", "k = lambda: 1", using("k: int = dataclasses.field(default_factory=k)", "self.k")),
    "partial method": ("K = 0", "K = 1", using("f = functools.partialmethod(max, K)", "self.f(x)")),
    "private list": ("T = [0]", "T = [1]", using("_t = T", "self._t[0] * x")),
    "private of an object": ("class H: pass\nh = H()\nh._k = 0", "h._k = 1", using("", "h._k * x")),
    "slot": (f"{SLOTS}0", f"{SLOTS}1", using("", "h.key * x")),
    "named tuple": (helper("NamedTuple", 0), helper("NamedTuple", 1), using("", "h.f(x)")),
    "dict": (helper("dict", 0), helper("dict", 1), using("", "h.f(x)")),
    "set of a user": (helper("set", 0), helper("set", 1), using("", "h.f(x)")),
    "list": (helper("list", 0), helper("list", 1), using("", "h.f(x)")),
    "enum": ("class E(enum.Enum): A = 0", "class E(enum.Enum): A = 1", using("", "E.A.value * x")),
    "of a function": ("def gate(x): return gate.k\ngate.k = 0", "gate.k = 1", OWN),
    "of a made module": ("h = types.ModuleType('h')\nh.k = 0", "h.k = 1", using("", "h.k * x")),
    "long repr": (f"{LONG}0", f"{LONG}1", using("", "h(x)")),
    "set": ("s = types.SimpleNamespace(a={'b'})", "s = types.SimpleNamespace(a={'c'})", using("", "len(s.a) * x")),
    "objects": ("W = np.array([[0], None], object)", "W = np.array([[1], None], object)", using("", "W[0][0] * x")),
    "of a library": ("import re\ngate = re.compile('a')", "gate = re.compile('b')", OWN),
}


def run(names, *cells):
    """Run cells; the digest of `Own`."""
    for text in cells:
        file = f"<cell {hash(text)}>"  # the same for the same text, as in Jupyter
        linecache.cache[file] = len(text), None, text.splitlines(True), file
        exec(compile(text, file, "exec"), names)
    return digest(names["Own"])


@pytest.mark.parametrize("edit", EDITS)
def test_edit_changes_the_digest_and_taken_back_restores_it(edit):
    before, after, own = EDITS[edit]
    names = {"__name__": "notebook"}
    first = run(names, IMPORTS, before, own)
    assert run(names, after, own) != first
    assert run(names, before, own) == first == run({"__name__": "another"}, IMPORTS, before, own)


def test_comments_names_that_are_not_reached_and_uses_are_no_part():
    names = {"__name__": "notebook"}
    first = run(names, IMPORTS, "def gate(x): return x", OWN)
    others = ["x = 3\nother = 4", "print(Own)", OWN.replace("return", "'doc'\n        # why\n        return")]
    others += ["def gate(x: float) -> float:\n    return x"]
    others += ["def gate(x):\n    '''It is the same.'''\n    return x"]
    assert {run(names, other) for other in others} == {first}


def test_class_has_the_base_that_it_was_defined_with():
    names = {"__name__": "notebook"}
    before, after, _ = EDITS["base"]
    first = run(names, IMPORTS, before.replace("gate = 0", ""), "gate = 0", DERIVED)
    assert run(names, after.replace("gate = 1", "").replace("return", "return 2 *")) == first
    assert run(names, DERIVED) != first
    assert run(names, "Own.after = lambda self: 0") != run(names, "Own.after = lambda self: 1")


def test_values_and_lambdas_in_one_line_differ_by_what_they_compute(tmp_path):
    one, other = (lambda s, b, h, i, j: s + i), (lambda s, b, h, i, j: s - i)  # fmt: skip
    assert digest(one) != digest(other) and digest(ScoreFn(one)) != digest(ScoreFn(other))


def test_file_that_has_changed_since_it_ran_has_the_digest_of_what_runs(tmp_path):
    file, names = tmp_path / "mine.py", {"__name__": "mine"}
    file.write_text("def gate(x): return x")
    exec(compile(file.read_text(), str(file), "exec"), names)
    first = digest(names["gate"])
    file.write_text("def gate(x): return 2 * x")
    old = digest(names["gate"])
    exec(compile(file.read_text(), str(file), "exec"), names)
    (again := tmp_path / "again.py").write_text(file.read_text())
    exec(compile(again.read_text(), str(again), "exec"), others := {"__name__": "again"})
    assert digest(names["gate"]) == digest(others["gate"]) not in (old, first)


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<timed exec>"])
def test_code_without_a_text_has_the_digest_of_its_instructions(file):
    names = {"__name__": "prompt"}
    first = run(names, IMPORTS, "def gate(x): return x", OWN)
    found = [first]
    for text in ("def gate(x): return 2 * x", "def gate(x): return 3 * x", "def gate(x): return 2 * x"):
        exec(compile(text, file, "exec"), names)
        found.append(digest(names["Own"]))
    assert len({*found}) == 3 and found[1] == found[3]


def test_cell_that_awaits_has_a_digest():
    names = {"__name__": "notebook"}
    run(names, IMPORTS, OWN, "def gate(x): return x")
    first, text, file = digest(names["Own"]), "await nothing\ndef gate(x): return 2 * x", "<cell that awaits>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    gate = compile(text, file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT).co_consts
    names["gate"] = types.FunctionType(next(each for each in gate if isinstance(each, types.CodeType)), names)
    assert digest(names["Own"]) != first


def test_modules_of_a_user_count_with_what_they_import(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "attnlab_helpers.py").write_text("import attnlab_inner as inner\nk = 1")
    (tmp_path / "attnlab_inner.py").write_text("def f(x): return x")
    names = {"__name__": "notebook"}
    own = using("", "x").replace("return x", "\n        import attnlab_helpers as h\n        return h.k * h.inner.f(x)")
    exec("import attnlab_helpers", names)
    found, helpers = [run(names, IMPORTS, own)], names["attnlab_helpers"]
    helpers.k = 2  # at run time
    found.append(digest(names["Own"]))
    (tmp_path / "attnlab_inner.py").write_text("def f(x): return 10 * x")
    importlib.reload(helpers.inner)
    assert len({*found, digest(names["Own"])}) == 3


@pytest.mark.slow
def test_digest_is_the_same_in_every_process(tmp_path):
    (tmp_path / "mine.py").write_text(
        f"{IMPORTS}\nfrom attnlab.nn.digests import digest\nW = np.array([['q', {{}}], None], object)\n"
        f"s = types.SimpleNamespace(a={{'q', 'w', 'e', 'r', 't'}})\n{using('', 'len(s.a) * W[0]')}\nprint(digest(Own))"
    )
    found = {
        subprocess.check_output([sys.executable, tmp_path / "mine.py"], env=os.environ | {"PYTHONHASHSEED": seed})
        for seed in ("0", "1", "2")
    }
    assert len(found) == 1


def test_value_without_a_digest_is_named_in_one_line():
    names = {"__name__": "notebook"}
    run(names, IMPORTS, OWN, "def gate(x): return W\nW = jnp.ones(2)")
    names["W"].delete()
    with pytest.raises(UserError, match="^Own computes with a value that has no digest .RuntimeError: .*: keep it out"):
        digest(names["Own"])
