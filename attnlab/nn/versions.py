"""Versions of user code: a sha256 of what JAX traces of a model or an optimizer, and numbers that it computes.

Source text does not show what code computes: globals, closures and attributes matter, memos and comments do not. So a
version is a digest of jaxprs, where the specification of each attnlab operator replaces the implementation, whatever
`impl` and the platform. If another version of JAX traces the same code differently, the saved numbers decide.
"""

import contextlib
import contextvars
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab.nn.config import ModelConfig
from attnlab.nn.matrices import matrices_of
from attnlab.nn.transformer import GPT
from attnlab.ops import platforms
from attnlab.ops.jaxprs import Digest
from attnlab.support import provenance
from attnlab.support.errors import UserError

BATCH, FEW, FURTHER = 2, 16, 4  # sequences; tokens for the numbers; longest length divided by the context
_NEEDED = ("init", "forward", "gradient", "update")  # programs that a model or an optimizer must run
TOLERANCES = {"float32": 1e-3, "bfloat16": 3e-2}  # relative to the array's size: thousands of roundings; 8 in bfloat16
_TAKEN: contextvars.ContextVar[dict | None] = contextvars.ContextVar("traces", default=None)
_USERS = jax.make_user_context(None)  # new in each trace, so that a user's jitted functions are traced again


@contextlib.contextmanager
def taken_once() -> Iterator[None]:
    """Context manager or decorator within which equal code is traced once; between calls, users may edit cells."""
    token = _TAKEN.set({} if _TAKEN.get() is None else _TAKEN.get())
    try:
        yield
    finally:
        _TAKEN.reset(token)


class Code(NamedTuple):
    """A model or an optimizer whose version can be computed.

    Attributes:
      key: equal for equal code within one `taken_once`.
      programs: returns, by name, what is traced: a function and the shapes of its arguments, or a text.
      numbered: returns the programs whose numbers are saved. They have few tokens and no random numbers, because random
        numbers differ between versions of JAX.
      tolerance: tolerance of numbers, relative to the size of their array.
    """

    key: Any
    programs: Callable[[], Mapping[str, Any]]
    numbered: Callable[[], Mapping[str, tuple]] = dict
    tolerance: float = TOLERANCES["float32"]

    def trace(self) -> str:
        """The sha256 of what the code computes."""
        return self._once("trace", self._trace)

    def record(self) -> dict[str, Any]:
        """The entry in `config.json`: the trace, the numbers, library versions, and objects compared by their source.

        Raises:
          UserError: a second trace of the same code differs.
        """
        return self._once("record", self._record)

    def change(self, saved: Mapping[str, Any]) -> str:
        """How the code differs from the code of the record `saved`; "" if it is the same.

        Equal traces mean the same code. If library versions also differ, equal numbers suffice, with a warning.
        """
        if self.trace() == saved["trace"]:
            return ""
        now, then = _libraries(), saved["libraries"]
        others = ", ".join(f"{name} {then.get(name)} → {now[name]}" for name in now if then.get(name) != now[name])
        difference = _difference(saved["numbers"], numbers := self._numbers(), self.tolerance)
        if others and not difference:
            how = "its results are the same" if numbers else "its results are not compared"
            warnings.warn(f"a run's code was traced with other versions ({others}): {how}", stacklevel=2)
            return ""
        return difference or "in its operations, initial values or dropout, not in its results"

    def _once(self, what: str, take: Callable):
        """The result of `take`, which is called only once within `taken_once`."""
        taken = {} if _TAKEN.get() is None else _TAKEN.get()
        if (what, self.key) not in taken:
            taken[what, self.key] = take(), self  # keeps self alive, so that its objects' ids stay unique
        return taken[what, self.key][0]

    def _trace(self) -> str:
        self._add_to(digest := Digest())
        return digest.hexdigest()

    def _record(self) -> dict[str, Any]:
        digest, trace = Digest(), self.trace()
        failed = self._add_to(digest)
        if digest.hexdigest() != trace:
            raise UserError("two traces of its code differ: make its results independent of earlier calls")
        if missing := [f"{name} ({error})" for name, error in failed.items() if name in _NEEDED]:
            warnings.warn(f"edits will go unnoticed in code that cannot be traced alone: {missing[0]}", stacklevel=2)
        record = {"trace": trace, "libraries": _libraries(), "numbers": self._numbers()}
        return record | ({"by_source": sorted(digest.by_source)} if digest.by_source else {})

    def _add_to(self, digest: Digest) -> dict[str, str]:
        """Add all programs to a digest, or the error's type for a program that cannot run; return errors by name."""
        failed = {}

        def tried(name, call, *args):
            try:
                return call(*args)
            except Exception as error:  # user code may raise anything
                digest.write(type(error).__name__)
                failed[name] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"

        with _undisturbed():
            for name, program in (tried("init", self.programs) or {}).items():
                digest.write(name, program if isinstance(program, str) else "")
                if not isinstance(program, str):
                    tried(name, digest.add, *program)
        return failed

    def _numbers(self) -> dict[str, list[list[float]]]:
        """By program, for each array that it returns, the root mean square and a randomly weighted sum."""
        by_program = {}
        with _undisturbed(), jax.default_matmul_precision("highest"), contextlib.suppress(Exception):  # as in `_add_to`
            for name, (function, *shapes) in self.numbered().items():
                rng = np.random.default_rng(0)
                with contextlib.suppress(Exception):  # the model may not support the program
                    results = jax.jit(function)(*jax.tree.map(functools.partial(_drawn, rng), shapes))
                    numbers = [_numbers_of(rng, np.asarray(x, np.float64)) for x in jax.tree.leaves(results)]
                    by_program[name] = numbers if np.isfinite(numbers).all() else []
        return by_program


def of_model(model: ModelConfig | nn.Module, context: int, packed: bool = False) -> Code:
    """The code of a model: a config's GPT with one period of layers and one more, or a module called like a GPT.

    Args:
      context: number of tokens in a sequence.
      packed: whether a sequence holds several documents.
    """

    def numbered():
        exact = {"dtype": jnp.float32} if isinstance(model, ModelConfig) else {}
        programs = _programs(_module(model, **exact), min(FEW, context))
        return {name: program for name, program in programs.items() if name in ("gradient", "step")}

    is_exact = isinstance(model, ModelConfig) or getattr(model, "dtype", None) != jnp.bfloat16
    tolerance = TOLERANCES["float32" if is_exact else "bfloat16"]
    return Code(
        (_known(model), context, packed), lambda: _programs(_module(model), context, packed), numbered, tolerance
    )


def _module(model: ModelConfig | nn.Module, **fields) -> nn.Module:
    """The module that is traced for a model."""
    if not isinstance(model, ModelConfig):
        return model
    depth = min(model.num_layers, len(model.layers) + 1)  # one more layer, which uses the first layer's values
    fields |= {"num_layers": depth, "vocab_size": 256, "padded_vocab_size": None, "remat": "none"}
    return GPT(model.replace(**fields))


def of_optimizer(optimizer: optax.GradientTransformation, params) -> Code:
    """The code of an optimizer, for parameters of these shapes; it has no numbers."""

    def programs():
        state = jax.eval_shape(optimizer.init, params)
        return {"init": (optimizer.init, params), "update": (optimizer.update, params, state, params)}

    return Code((_known(optimizer), "optimizer"), programs)


def _programs(model: nn.Module, length: int, packed: bool = False) -> dict[str, Any]:
    """The programs of a model that is called like a GPT."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), BATCH))
    tokens, further = (jax.ShapeDtypeStruct((BATCH, n * length), jnp.int32) for n in (1, FURTHER))
    variables = jax.eval_shape(model.init, key, tokens)

    def forward(variables, tokens, **options):
        return model.apply(variables, tokens, **options)

    def gradient(variables, tokens):
        logits, pull = jax.vjp(lambda variables: forward(variables, tokens), variables)
        weights = jnp.sin(jnp.arange(logits.size, dtype=jnp.float32)).reshape(logits.shape)
        return logits, pull(weights.astype(logits.dtype))

    def step(variables, tokens):
        """Decode the last token after all others."""
        logits, caches = forward(variables, tokens[:, :-1], caches=model.init_caches(BATCH, length))
        return logits, forward(variables, tokens[:, -1:], caches=caches)[0]

    def dropped(variables, tokens, keys):
        return forward(variables, tokens, deterministic=False, dropout_key=keys)

    def of_documents(variables, tokens, segments):
        return forward(variables, tokens, segments=segments)

    is_gpt = isinstance(model, GPT)
    programs = {"init": (model.init, key, tokens), "forward": (forward, variables, tokens)}
    programs |= {"gradient": (gradient, variables, tokens), "further": (forward, variables, further)}
    if is_gpt:
        programs["step"] = step, variables, tokens
    if not is_gpt or model.config.dropout or any(layer.make(model.config).drops for layer in model.config.used):
        programs["dropout"] = dropped, variables, tokens, keys
    if packed:
        programs["documents"] = of_documents, variables, tokens, tokens
    return programs | {"matrices": str(sorted(matrices_of(model, tokens).items()))}


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Context manager in which a trace depends only on the code."""
    with contextlib.ExitStack() as contexts:
        mesh = jax.sharding.AbstractMesh((), ())
        for each in (
            platforms.as_specified(),
            _USERS(object()),
            jax.enable_x64(False),
            jax.default_matmul_precision(None),
            jax.sharding.use_abstract_mesh(mesh),
            nn.logical_axis_rules(()),
        ):
            contexts.enter_context(each)
        yield


def _known(value):
    """A value, or its id if it has no hash."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _drawn(rng: np.random.Generator, shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """Draw values for a shape: small numbers, or tokens 0 and 1."""
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return rng.integers(0, 2, shape.shape).astype(shape.dtype)
    return (0.1 * rng.normal(size=shape.shape)).astype(shape.dtype)


def _numbers_of(rng: np.random.Generator, x: np.ndarray) -> list[float]:
    """The root mean square of an array, and a randomly weighted sum of similar size."""
    x = x.ravel() / max(1, x.size) ** 0.5
    return [float(f"{number:.7g}") for number in (np.linalg.norm(x), rng.normal(size=x.size) @ x)]


def _difference(before: Mapping[str, list], now: Mapping[str, list], tolerance: float) -> str:
    """The first program whose numbers differ, and by how much; "" for none."""
    for name in dict.fromkeys([*before, *now]):
        was, is_ = (np.array(each.get(name, []), np.float64).reshape(-1, 2) for each in (before, now))
        if len(was) != len(is_) or not len(was):
            return f"its {name}, from {len(was)} arrays of numbers to {len(is_)}"
        error = (np.abs(was - is_).max(axis=1) / np.maximum(np.maximum(was, is_)[:, 0], 1e-30)).max()
        if error > tolerance:
            return f"its {name}, by {error:.1%}"
    return ""


@functools.cache
def _libraries() -> dict[str, str]:
    """Versions of the libraries that trace code; for attnlab also a digest of its files, as a clone may change them."""
    versions = {name: version for name, version in provenance.versions().items() if name in ("jax", "flax", "optax")}
    return versions | {"attnlab": f"{provenance.versions()['attnlab']} {provenance.sources()}"}
