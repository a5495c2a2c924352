"""Digests of code: they change with what a function, class or value computes, and with nothing else."""

import linecache

import pytest

from attnlab.nn.digests import digest
from attnlab.score_mods import ScoreFn

IMPORTS = "import functools, jax, numpy as np, jax.numpy as jnp\nfrom flax import linen as nn"
OWN = """class Own(nn.Module):
    def __call__(self, x):
        return gate(x)"""
FIELD = "class Own(nn.Module):\n    scale: float = K\n    def __call__(self, x): return self.scale * x"
STATIC = "class Own(nn.Module):\n    gate = staticmethod(gate)\n    def __call__(self, x): return self.gate(x)"
DERIVED = "class Own(Base): pass"
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
