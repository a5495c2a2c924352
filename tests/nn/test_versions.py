"""Code versions change if what a model or an optimizer computes changes, and only then."""

import json
import linecache
import os
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from attnlab.nn import versions
from attnlab.nn.config import ModelConfig
from attnlab.support.errors import UserError

RECORD = Path(__file__).parents[1] / "golden" / "version.json"  # python -m tests.nn.test_versions writes it
IMPORTS = (
    "import dataclasses, enum, functools, jax, re, types, numpy as np, jax.numpy as jnp, optax\n"
    "from flax import linen as nn\nfrom typing import NamedTuple"
)
OWN = """class Own(nn.Module):
    @nn.compact
    def __call__(self, x):
        return gate(x)"""
BASE = OWN.replace("Own", "Base")


class Model(nn.Module):
    """A model around a user's module, which maps `[B, T, 2]` to `[B, T, 2]`."""

    own: type[nn.Module]

    @nn.compact
    def __call__(self, tokens, deterministic=True, dropout_key=None):
        x = nn.Embed(8, 2)(tokens)
        return x + self.own()(x)


def using(body, out):
    """Source of a class with `body`, and a `__call__` that returns `out`."""
    return f"class Own(nn.Module):\n    {body}\n    def __call__(self, x): return {out}"


def helper(base, factor):
    return f"class H({base}):\n    a: int = 1\n    def f(self, x): return {factor} * x\nh = H()"


FIELD, STATIC = using("scale: float = K", "self.scale * x"), using("gate = staticmethod(gate)", "self.gate(x)")
PROPERTY = using("@property\n    def k(self): return K", "self.k * x")
PARTIAL = using("f = functools.partialmethod(lambda self, k, x: k * x, K)", "self.f(x)")
INITIAL = using("@nn.compact", "nn.Dense(2, kernel_init=i)(x)")
BOTH = "def gate(x):\n    y, z = jnp.sin(x), jnp.cos(x)\n    return"
SLOTS = "class H:\n    __slots__ = 'key'\nh = H()\nh.key = "
CALLBACK = "gate = lambda x: jax.pure_callback({}, x, jax.lax.stop_gradient(x))"

# Notebook cells (before, after, own): `before` is edited to `after`, and `own` runs again.
EDITS = {
    "helper": ("def gate(x): return 0.5 * x", "def gate(x): return x * 2", OWN),
    "alias": ("gate = jnp.zeros_like", "gate = jnp.positive", OWN),
    "module attribute": ("import math\ngate = lambda x: math.sin(1)", "import math\ngate = lambda x: math.cos(1)", OWN),
    "literal": ("gate = lambda x: K * x\nK = 0.0", "gate = lambda x: K * x\nK = 1.0", OWN),
    "array": ("W = np.zeros(2)\ngate = lambda x: W * x", "W = np.ones(2)\ngate = lambda x: W * x", OWN),
    "key": ("gate = lambda x: jax.random.uniform(k)\nk = jax.random.key(0)", "k = jax.random.key(1)", OWN),
    "in place": ("W = np.zeros(2)\ngate = lambda x: W", "W = np.zeros(2)\nW[0] = 1\ngate = lambda x: W", OWN),
    "field": ("K = 0.0", "K = 1.0", FIELD),
    "static": ("def gate(x): return 0 * x", "def gate(x): return 1 * x", STATIC),
    "base": (f"{BASE}\ngate = jnp.sin", f"{BASE}\ngate = jnp.cos", "class Own(Base): pass"),
    "partial": ("gate = functools.partial(jnp.multiply, 0)", "gate = functools.partial(jnp.multiply, 1)", OWN),
    "closure": ("f = lambda k: lambda x: k * x\ngate = f(0)", "f = lambda k: lambda x: k * x\ngate = f(1)", OWN),
    "default": ("K = 0\ndef gate(x, k=K): return k * x", "K = 1\ndef gate(x, k=K): return k * x", OWN),
    "nested": ("K = 0\ngate = lambda x: jax.tree.map(lambda y: K * y, x)", "K = 1", OWN),
    "attribute": ("T = [0]", "T = [1]", using("table = T", "self.table[0] * x")),
    "jitted": ("gate = jax.jit(lambda x: 0 * x)", "gate = jax.jit(lambda x: 1 * x)", OWN),
    "behind a jitted helper": ("gate = jax.jit(lambda x: K * x)\nK = 0", "K = 1", OWN),
    "vmapped": ("gate = jax.vmap(jnp.sort)", "gate = jax.vmap(jnp.flip)", OWN),
    "module": ("gate = lambda x: nn.Dense(2)(x)", "gate = lambda x: nn.Dense(2, use_bias=False)(x)", OWN),
    "initial values": ("i = nn.initializers.ones", "i = nn.initializers.zeros", INITIAL),
    "name": ("n = 'a'", "n = 'b'", using("@nn.compact", "self.param(n, nn.initializers.ones, 2) * x")),
    "primitive": ("gate = jnp.floor", "gate = jnp.ceil", OWN),
    "order": (f"{BOTH} y - z", f"{BOTH} z - y", OWN),
    "container": ("gates = {'a': [0]}\ngate = lambda x: gates['a'][0] * x", "gates = {'a': [1]}", OWN),
    "property": ("K = 0", "K = 1", PROPERTY),
    "cached property": ("K = 0", "K = 1", PROPERTY.replace("property", "functools.cached_property")),
    "behind a field": ("act = nn.relu", "act = nn.tanh", using("act: object = act", "self.act(x)")),
    "behind an attribute": ("act = nn.relu", "act = nn.tanh", using("act = staticmethod(act)", "self.act(x)")),
    "factory": ("k = lambda: 0", "k = lambda: 1", using("k: int = dataclasses.field(default_factory=k)", "self.k * x")),
    "partial method": ("K = 0", "K = 1", PARTIAL),
    "private list": ("T = [0]", "T = [1]", using("_t = T", "self._t[0] * x")),
    "private attribute": ("class H: pass\nh = H()\nh._k = 0", "h._k = 1", using("", "h._k * x")),
    "slot": (f"{SLOTS}0", f"{SLOTS}1", using("", "h.key * x")),
    "named tuple": (helper("NamedTuple", 0), helper("NamedTuple", 1), using("", "h.f(x)")),
    "list": (helper("list", 0), helper("list", 1), using("", "h.f(x)")),
    "enum": ("class E(enum.Enum): A = 0", "class E(enum.Enum): A = 1", using("", "E.A.value * x")),
    "function attribute": ("def gate(x): return gate.k * x\ngate.k = 0", "gate.k = 1", OWN),
    "created module": ("h = types.ModuleType('h')\nh.k = 0", "h.k = 1", using("", "h.k * x")),
    "library object": ("h = re.compile('a')", "h = re.compile('b')", using("", "bool(h.match('a')) * x")),
    "backward rule": (
        "gate = jax.custom_vjp(jnp.sin)\ngate.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cos(x) * g,))",
        "gate = jax.custom_vjp(jnp.sin)\ngate.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (x * g,))",
        OWN,
    ),
    "longer sequences": ("K = 0", "K = 1", using("", "K * x if x.shape[1] > 8 else x")),
    "loop": ("N = 2", "N = 3", using("", "jax.lax.fori_loop(0, N, lambda i, x: 0.5 * x, x)")),
    "branch": ("f = jnp.sin", "f = jnp.cos", using("", "jax.lax.cond(x.sum() > 0, jnp.tan, f, x)")),
}  # fmt: skip

# The cell before `Own`, and rewrites that compute the same.
FIRST = "K = 0.5\ndef gate(x): return K * x"
NEUTRAL = {
    "comment": "K = 0.5\ndef gate(x):\n    # half\n    return K * x",
    "docstring": "K = 0.5\ndef gate(x):\n    'Half of x.'\n    return K * x",
    "annotation": "K: float = 0.5\ndef gate(x: jax.Array) -> jax.Array: return K * x",
    "renamed": "HALF = 0.5\ndef half(z): return HALF * z\ngate = half",
    "moved": "def gate(x): return K * x\nK = 0.5",
    "spread": "K = 0.5\ndef gate(x):\n    y = K\n    z = y * x\n    return z",
    "split": "K = 0.5\ndef inner(x): return K * x\ndef gate(x): return inner(x)",
    "lambda": "gate = lambda x: 0.5 * x",
    "constant": "K = 1 / 2\ngate = lambda x: K * x",
    "closure": "gate = (lambda k: lambda x: k * x)(0.5)",
    "default": "def gate(x, k=0.5): return k * x",
    "partial": "gate = functools.partial(lambda k, x: k * x, 0.5)",
    "jitted": "gate = jax.jit(lambda x: 0.5 * x)",
    "named for profiles": "gate = jax.named_call(lambda x: 0.5 * x, name='half')",
    "decorated": "def same(f): return f\n@same\ndef gate(x): return 0.5 * x",
    "method": "class H:\n    def f(self, x): return 0.5 * x\ngate = H().f",
    "callable": "class H:\n    k = 0.5\n    def __call__(self, x): return self.k * x\ngate = H()",
    "table": "T = {'half': 0.5, 'other': 3}\ngate = lambda x: T['half'] * x",
    "set": "S = {'a', 'b', 'c'}\ngate = lambda x: 0.5 * x if len(S) == 3 else x",
    "memo": "M = {}\ndef gate(x): return M.setdefault(x.shape, 0.5) * x",
    "counter": "N = [0]\ndef gate(x):\n    N[0] += 1\n    return 0.5 * x",
    "traces kept": "SEEN = []\ndef gate(x):\n    SEEN.append(x)\n    return 0.5 * x",
    "shown": "def gate(x):\n    str(x.shape)\n    return 0.5 * x",
    "unused import": "import math\ngate = lambda x: 0.5 * x",
    "unused value": "W = np.ones(3)\ngate = lambda x: 0.5 * x",
    "unused branch": "gate = lambda x: 0.5 * x if True else jnp.sin(x)",
    "checked": "def gate(x):\n    assert x.ndim == 3\n    return 0.5 * x",
    "guarded": "def gate(x):\n    try:\n        return 0.5 * x\n    finally:\n        pass",
    "loop of one": "def gate(x):\n    for _ in range(1):\n        x = 0.5 * x\n    return x",
    "star": "def gate(*args, **options): return 0.5 * args[0]",
    "walrus": "def gate(x): return (k := 0.5) * x",
    "match": "def gate(x):\n    match x.ndim:\n        case 3: return 0.5 * x",
    "subclass": "class Half(float): pass\nK = float(Half(0.5))\ngate = lambda x: K * x",
    "global": "def gate(x):\n    global SEEN\n    SEEN = 1\n    return 0.5 * x",
    "warned": "def gate(x):\n    len(repr(x.dtype))\n    return 0.5 * x",
    "cached": "@functools.cache\ndef k(): return 0.5\ngate = lambda x: k() * x",
    "generator": "gate = lambda x: next(0.5 * y for y in [x])",
    "mapped": "gate = lambda x: jax.tree.map(lambda y: 0.5 * y, x)",
    "typed": "gate = lambda x: jax.typeof(x) and 0.5 * x",
    "donated": "gate = jax.jit(lambda x: 0.5 * x, donate_argnums=0, inline=True)",
}  # fmt: skip


def run(names, *cells):
    """Run cells as a notebook does, and return the trace of `Own`."""
    for text in cells:
        file = f"<cell {hash(text)}>"
        linecache.cache[file] = len(text), None, text.splitlines(True), file
        exec(compile(text, file, "exec"), names)
    return versions.of_model(Model(names["Own"]), 4).trace()


@pytest.mark.parametrize("edit", EDITS)
def test_edit_changes_the_trace_and_undo_restores_it(edit):
    before, after, own = EDITS[edit]
    names = {"__name__": "notebook"}
    first = run(names, IMPORTS, before, own)
    assert run(names, after, own) != first
    assert run(names, before, own) == first


def test_equivalent_code_has_the_same_trace():
    names = {"__name__": "notebook"}
    first = run(names, IMPORTS, FIRST, OWN)
    assert [edit for edit, text in NEUTRAL.items() if run(names, text, OWN) != first] == []
    assert run(names, f"class Base(nn.Module):\n    k: float = 0.5\n{using('', '0.5 * x')}", FIRST) == first
    assert run({"__name__": "another"}, IMPORTS, FIRST, OWN) == first


@pytest.mark.slow
def test_trace_is_the_same_in_every_process():
    text = "from tests.nn.test_versions import *\nn = {'__name__': 'n'}\n"
    text += "print(run(n, IMPORTS, FIRST, OWN), [run(n, *EDITS[each][::2]) for each in ('key', 'backward rule')])"
    outputs = {
        subprocess.check_output([sys.executable, "-c", text], env=os.environ | {"PYTHONHASHSEED": seed})
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1


def model(**changes):
    sizes = {"num_layers": 2, "num_heads": 2, "width": 8, "context": 8}
    return ModelConfig.of(**sizes | changes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "latent", "stick_breaking", "linear", "gated_delta"])
def test_operators_trace_as_their_specification_on_every_platform(kind, monkeypatch):
    config = model(layers=kind)
    here = versions.of_model(config, 8, packed=True).trace()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert versions.of_model(config, 8, packed=True).trace() == here
    assert versions.of_model(config.replace(width=16), 8, packed=True).trace() != here


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_trace_is_independent_of_the_implementation(impl):
    traces = {versions.of_model(model(attention={"impl": each}), 8).trace() for each in (impl, "auto")}
    assert len(traces) == 1


def test_optimizer_trace_changes_with_its_update():
    params = {"kernel": jax.ShapeDtypeStruct((2, 3), np.float32), "bias": jax.ShapeDtypeStruct((3,), np.float32)}
    first, same, other = (versions.of_optimizer(optax.adam(rate), params) for rate in (0.1, 0.1, 0.2))
    masked = optax.masked(optax.adam(0.1), lambda tree: {"kernel": True, "bias": False})
    assert first.trace() == same.trace()
    assert len({first.trace(), other.trace(), versions.of_optimizer(masked, params).trace()}) == 3
    assert not same.change(first.record()) and "operations" in other.change(first.record())


class Half(nn.Module):
    factor: float = 0.5

    @nn.compact
    def __call__(self, x):
        return self.factor * nn.Dense(2)(x)


def scaled(factor):
    return versions.of_model(Model(lambda: Half(factor)), 8)


def test_numbers_decide_when_library_versions_differ():
    saved = json.loads(json.dumps(scaled(0.5).record()))
    assert scaled(0.5).change(saved) == ""
    assert "its gradient, by " in scaled(0.51).change(saved)
    older = saved | {"libraries": saved["libraries"] | {"jax": "0.1"}, "trace": "of another JAX"}
    with pytest.warns(UserWarning, match=r"traced with other versions \(jax 0.1 → .*: its results are the same"):
        assert scaled(0.5).change(older) == ""
    assert "its gradient, by " in scaled(0.505).change(older)


def recorded():
    return versions.of_model(model(layers="attention gated_delta"), 8)


def test_record_of_another_attnlab_is_valid_if_numbers_match():
    """The record was written with JAX 0.10.2 and an earlier attnlab."""
    record = json.loads(RECORD.read_text())
    with pytest.warns(UserWarning, match="its results are the same"):
        assert recorded().change(record | {"libraries": record["libraries"] | {"attnlab": "earlier"}}) == ""


def test_code_that_depends_on_earlier_calls_is_an_error():
    names = {"__name__": "notebook"}
    run(names, IMPORTS, "N = [0]\ndef gate(x):\n    N[0] += 1\n    return N[0] * x", OWN)
    with pytest.raises(UserError, match="^two traces of its code differ: make its results independent of"):
        versions.of_model(Model(names["Own"]), 4).record()


def test_callbacks_are_compared_by_source():
    names = {"__name__": "notebook"}
    functions = ("np.sin", "np.cos", "lambda x: np.sin(x)", "lambda x: np.cos(x)", "functools.partial(np.add, 1)")
    assert len({run(names, IMPORTS, CALLBACK.format(function), OWN) for function in functions}) == 5
    assert versions.of_model(Model(names["Own"]), 4).record()["by_source"] == ["add"]


class Alone(nn.Module):
    """A model that cannot be traced without its mesh."""

    @nn.compact
    def __call__(self, tokens, deterministic=True, dropout_key=None):
        return jax.lax.with_sharding_constraint(nn.Embed(8, 2)(tokens), jax.sharding.PartitionSpec("data"))


def test_code_that_cannot_be_traced_alone_warns():
    with pytest.warns(UserWarning, match="edits will go unnoticed in code that cannot be traced alone: init"):
        versions.of_model(Alone(), 4).record()


if __name__ == "__main__":
    RECORD.write_text(json.dumps(recorded().record() | {"trace": "of an earlier attnlab"}))
