"""Values that a user passes to `attnlab.train.train`: what `config.json` remembers of them, and what they compute with.

They are remembered as text that is the same for equal values in another process.
"""

import dataclasses
import functools
import hashlib
import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab.nn import custom
from attnlab.nn.digests import digest
from attnlab.ops.masks import Mask
from attnlab.ops.score_mods import ScoreMods
from attnlab.support.errors import UserError

_INNER = {"parent", "name"}  # fields of every module
_SOURCE = "source code"
_PRECISIONS = ("float32", "bfloat16")


class Passed(NamedTuple):
    """Arguments of `train` in place of a config's values, or besides them; None for the config's alone."""

    layers: type[nn.Module] | None = None
    mask: Mask | None = None
    score_mod: ScoreMods | None = None
    model: nn.Module | None = None
    optimizer: optax.GradientTransformation | None = None

    def of_experiment(self) -> dict:
        """Arguments of `Experiment`: all but the layers, which a config names."""
        return {name: value for name, value in self._asdict().items() if name != "layers"}

    def of_model(self) -> dict[str, str]:
        """Fields of `config.model`: the name of the layers; UserError for a part of its GPT beside another model."""
        for name in ("layers", "mask", "score_mod"):
            if self.model is not None and getattr(self, name) is not None:
                raise UserError(f"{name}= is for the config's GPT, and model= takes its place: leave one of them out")
        return {} if self.layers is None else {"layers": custom.register(self.layers)}

    def metadata(self) -> dict:
        """The entry "user_defined" of `config.json`; {} where nothing is passed."""
        if all(value is None for value in self.of_experiment().values()):
            return {}
        found = {"model": self.model and type(self.model).__name__, "optimizer": self.optimizer is not None}
        found |= {} if self.model is None else {"fields": fields_of(self.model)}
        parts = {"mask": self.mask, "score_mod": self.score_mod}
        return {"user_defined": found | {name: described(part) for name, part in parts.items() if part is not None}}

    def check_continues(self, saved: Mapping, workdir) -> None:
        """Raise UserError unless the run in a workdir, with the `config.json` of `saved`, was passed the same."""
        self.check_reads(saved, workdir)
        was, is_ = saved.get("user_defined", {}).get("optimizer", False), self.optimizer is not None
        if was != is_:
            kinds = {True: "user-defined", False: "its config's"}
            raise UserError(
                f"{workdir} holds a run whose optimizer is {kinds[was]}, and now it is {kinds[is_]}: pass the same to "
                "attnlab.train.train(…, optimizer=…), or choose a new --workdir"
            )

    def check_reads(self, saved: Mapping, workdir) -> None:
        """Raise UserError unless the run in a workdir was trained with the same model, mask and score mod."""
        was, now = saved.get("user_defined", {}), self.metadata().get("user_defined", {})
        for name in ("model", "mask", "score_mod"):
            if was.get(name) != now.get(name):
                raise UserError(
                    f"{workdir} holds a run with {name} = {was.get(name)}, and {name}= gives {now.get(name)}: pass the "
                    f"same in Python, {name}=…, or None"
                )
        if found := difference(was.get("fields", {}), now.get("fields", {})):
            raise UserError(f"{workdir} holds a run of a {was['model']} whose {found}: pass an equal one, model=…")

    def precision(self, configured: str) -> str:
        """The precision that the user's model computes in; UserError where a config names another."""
        name = type(self.model).__name__
        if (dtype := getattr(self.model, "dtype", None)) is None:
            try:
                shapes = jax.eval_shape(self.model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
            except TypeError:  # `Experiment` tells how the model is called
                return "float32"
            # Where a module has no `dtype`, Flax computes in the type of its parameters.
            dtype = jnp.result_type(*jax.tree.leaves(shapes))
        found = jnp.dtype(dtype).name
        if found not in _PRECISIONS:
            raise UserError(f"{name} computes in {found}: expected {' or '.join(_PRECISIONS)}")
        if configured not in ("auto", found) and (configured, found) != ("tf32", "float32"):
            raise UserError(f"config.precision = {configured!r}, but {name} computes in {found}: leave it out")
        return found if configured == "auto" else configured


NOTHING = Passed()


def fields_of(module: nn.Module) -> dict[str, str]:
    """The fields of a module, described, and the source of its class unless it is attnlab's or Flax'."""
    fields = (field.name for field in dataclasses.fields(module) if field.name not in _INNER)
    found = {name: described(getattr(module, name)) for name in fields}
    is_library = type(module).__module__.partition(".")[0] in ("attnlab", "flax")
    return found if is_library else found | {_SOURCE: _source(type(module))}


def described(value: Any) -> str:
    """A value in words: arrays and functions by sha256, dataclasses and modules by their fields."""
    if isinstance(value, jax.Array | np.ndarray):
        array = np.asarray(value)
        return f"{array.dtype}{list(array.shape)} of sha256 {_digest(array.tobytes())}"
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in fields_of(value).items())})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = (f"{name}={described(x)}" for name, x in vars(value).items() if not name.startswith("_"))
        return f"{type(value).__name__}({', '.join(inner)})"
    if isinstance(value, functools.partial):
        return f"partial({described(value.func)}, {described(value.args)}, {described(value.keywords)})"
    if inspect.isfunction(value):
        return f"{value.__qualname__} of sha256 {digest(value)[:12]}"  # with its globals, closure and defaults
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {described(x)}" for key, x in value.items()) + "}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(described, value))})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def difference(saved: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The first name whose values differ, and both; "" for none."""
    for name in dict.fromkeys([*saved, *now]):
        if name == _SOURCE and name not in now:  # an attnlab or Flax class, saved before December 2026
            continue
        was, is_ = saved.get(name, "missing"), now.get(name, "missing")
        if _SOURCE in was and _SOURCE not in is_:  # likewise, in a field: versions differ in its fields, too
            was, is_ = was.partition("(")[0], is_.partition("(")[0]
        if was != is_:
            return f"{name} was {was}, and is {is_}"
    return ""


def _source(of) -> str:
    """The sha256 of the source of a class; its name where the source cannot be read."""
    try:
        return f"sha256 {_digest(inspect.getsource(of).encode())}"
    except (OSError, TypeError):
        return f"unknown source of {of.__qualname__}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
