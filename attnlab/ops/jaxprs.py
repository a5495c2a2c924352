"""Evaluate jaxprs equation by equation, digest what they compute, and hide differences between JAX versions."""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import linecache
import re
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Parameters of primitives that do not change what is computed, or whose effect the jaxpr of the gradient shows.
_NAMES = {"name", "debug_info", "in_tree", "out_tree", "out_trees", "symbolic_zeros"}
_PLACES = {"ctx_mesh", "in_shardings", "out_shardings", "in_layouts", "out_layouts", "sharding", "out_sharding"}
_COMPILED = {"inline", "donated_invars", "keep_unused", "compiler_options_kvs", "policy", "prevent_cse"}
_RULES = {"differentiated", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "fwd", "bwd", "call", "rule"}
_NO_PART = _NAMES | _PLACES | _COMPILED | _RULES
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call")


def evaluate(closed: ClosedJaxpr, arguments, visit: Callable = lambda equation, values: None) -> list:
    """Evaluate a jaxpr; visit(equation, values) returns an equation's results, or None to have JAX compute them.

    Equations run on the mesh in context, except that `jit` and functions with a derivative rule, such as `jax.nn.relu`,
    use the trace's mesh unless `visit` evaluates them. Equations retain their name scopes, which profiles show.
    """
    jaxpr = closed.jaxpr
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments)))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        scopes = str(equation.source_info.name_stack)
        with jax.named_scope(scopes) if scopes else contextlib.nullcontext():
            results = visit(equation, values)
            known |= dict(zip(equation.outvars, bind(equation, values) if results is None else results))
    return [read(atom) for atom in jaxpr.outvars]


def bind(equation, values) -> list:
    """The results of an equation's primitive."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # depends on JAX's version
    results = equation.primitive.bind(*functions, *values, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def inner(equation) -> ClosedJaxpr | None:
    """The jaxpr that an equation calls, or None."""
    names = (name for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in equation.params)
    jaxpr = equation.params.get(next(names, None))
    return jaxpr if jaxpr is None else _closed(jaxpr)


def called(equation) -> list[ClosedJaxpr]:
    """All jaxprs that an equation may run, such as the branches of a condition."""
    kinds = (ClosedJaxpr, Jaxpr)
    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, kinds))
    return [_closed(x) for x in leaves if isinstance(x, kinds)]


def _closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr as a ClosedJaxpr; since JAX 0.12 the two classes are one."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def consts_and_carry(params: dict) -> tuple[int, int]:
    """The numbers of a scan's constants and carried values."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since JAX 0.12
    return len(consts), len(carry)


class Digest:
    """A sha256 of the operations and constants of jaxprs, independent of the names of functions and variables.

    Attributes:
      by_source: names of objects in parameters of primitives, such as callbacks, that enter the digest by their source
        file, because their operations are unknown.

    >>> twice, again, thrice = Digest(), Digest(), Digest()
    >>> twice.add(lambda x: 2 * x, 1.0), again.add(jax.jit(lambda y: 2 * y), 1.0), thrice.add(lambda x: 3 * x, 1.0)
    (None, None, None)
    >>> twice.hexdigest() == again.hexdigest(), twice.hexdigest() == thrice.hexdigest()
    (True, False)
    """

    def __init__(self):
        self._hash, self._count, self.by_source = hashlib.sha256(), 0, set()

    def hexdigest(self) -> str:
        """The sha256 of everything added."""
        return self._hash.hexdigest()

    def add(self, function: Callable, *args) -> None:
        """Trace a function of trees of arrays or shapes; add its operations and the paths of the trees' leaves."""
        closed = jax.make_jaxpr(function)(*args)
        self.write(*(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(args)))
        self.write(self._closed(closed))

    def write(self, *parts) -> None:
        """Add numbers or strings."""
        self._hash.update(repr(parts).encode())

    def _array(self, x) -> None:
        x = np.ascontiguousarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        self.write("array", str(x.dtype), x.shape, hashlib.sha256(x.tobytes()).hexdigest())

    def _new(self, variable, numbers) -> None:
        self._count += 1
        numbers[variable] = self._count
        aval = variable.aval
        self.write(self._count, str(aval.dtype), aval.shape, bool(getattr(aval, "weak_type", False)))

    def _closed(self, closed: ClosedJaxpr, arguments=None) -> list:
        """Add a jaxpr, inlined if `arguments` lists its inputs' numbers; return the numbers of its results."""
        jaxpr, numbers = closed.jaxpr, {}
        for variable, value in zip(jaxpr.constvars, closed.consts):
            self._new(variable, numbers)
            self._array(value if hasattr(value, "dtype") else np.asarray(value))
        if arguments is None:
            for variable in jaxpr.invars:
                self._new(variable, numbers)
        numbers |= dict(zip(jaxpr.invars, arguments or ()))
        for equation in jaxpr.eqns:
            self._equation(equation, numbers)
        return [self._number(atom, numbers) for atom in jaxpr.outvars]

    def _number(self, atom, numbers):
        if isinstance(atom, Literal):
            self._array(np.asarray(atom.val))
            return "literal"
        return numbers[atom]

    def _equation(self, equation, numbers) -> None:
        inputs = [self._number(atom, numbers) for atom in equation.invars]
        if equation.primitive.name in _CALLS and (called := inner(equation)) is not None:
            numbers |= dict(zip(equation.outvars, self._closed(called, inputs)))
            return
        self.write(equation.primitive.name, inputs)
        for name, value in sorted(equation.params.items()):
            if name not in _NO_PART:
                self.write(name)
                self._value(value)
        for variable in equation.outvars:
            self._new(variable, numbers)

    def _value(self, x) -> None:
        """Add a parameter of a primitive."""
        if isinstance(x, ClosedJaxpr | Jaxpr):
            self._closed(_closed(x))
        elif isinstance(x, np.ndarray | jax.Array):
            self._array(x)
        elif x is None or isinstance(x, bool | int | float | complex | str | bytes | np.dtype | np.generic):
            self.write(repr(x))
        elif isinstance(x, type):
            self.write(x.__name__)
        elif isinstance(x, tuple | list):
            self.write(len(x), getattr(x, "_fields", ()))
            for each in x:
                self._value(each)
        elif isinstance(x, Mapping):
            self._value(sorted(x.items(), key=repr))
        elif isinstance(x, functools.partial):
            self._value([x.func, x.args, x.keywords])
        elif dataclasses.is_dataclass(x):
            self._value([type(x), *(getattr(x, field.name) for field in dataclasses.fields(x))])
        elif type(x).__module__.partition(".")[0] in ("jax", "jaxlib") and "0x" not in repr(x):
            self.write(repr(x))  # enumerations and the like
        else:
            self._source(x)

    def _source(self, x) -> None:
        """Add the repr of an object that is not an array, jaxpr or number, and the text of its source file."""
        function = inspect.unwrap(x) if callable(x) else x
        code = getattr(function, "__code__", None) or getattr(type(x).__call__, "__code__", None)
        self.by_source.add(getattr(function, "__qualname__", type(x).__name__))
        self.write(re.sub(r" at 0x[0-9a-f]+", "", repr(x)), *(linecache.getlines(code.co_filename) if code else ()))
