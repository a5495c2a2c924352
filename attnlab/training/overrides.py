"""Values that a user passes to `attnlab.train.train`, and the user's code that a run computes with."""

import dataclasses
import re
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from attnlab.config import RunConfig
from attnlab.nn import GPT, ModelConfig, custom, records, versions
from attnlab.ops.masks import Mask
from attnlab.support.errors import UserError

_PRECISIONS = ("float32", "bfloat16")


class Overrides(NamedTuple):
    """Arguments of `train` that replace values of the config; None keeps the config's."""

    model: nn.Module | None = None
    optimizer: optax.GradientTransformation | None = None

    def metadata(self) -> dict:
        """The entry "user_defined" of `config.json`, which describes the overrides in words; {} without any."""
        if self.model is self.optimizer is None:
            return {}
        model = None if self.model is None else _shown(self.model)
        return {"user_defined": {"model": model, "optimizer": self.optimizer is not None and "a user's"}}

    def code(self, config: RunConfig) -> dict[str, versions.Code]:
        """The user code of a run, by "model" and "optimizer"; a part without user code has no entry."""
        code, packed = {}, config.data.packing == "documents"
        model = config.model if self.model is None else self.model
        if self.model is not None or custom.code(config.model):
            code["model"] = versions.of_model(model, config.model.context, packed)
        if self.optimizer is not None:
            module = GPT(model) if isinstance(model, ModelConfig) else model
            params = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
            code["optimizer"] = versions.of_optimizer(self.optimizer, params)
        return code

    def check_continues(self, saved: Mapping, config: RunConfig, workdir) -> None:
        """Raise UserError unless the run in a workdir, whose `config.json` is `saved`, has the same code."""
        self._check(saved, config, workdir, self._fields)

    def check_reads(self, saved: Mapping, config: RunConfig, workdir) -> None:
        """Raise UserError unless the run in a workdir was trained with the same model."""
        self._check(saved, config, workdir, ("model",))

    def _check(self, saved: Mapping, config: RunConfig, workdir, names: tuple[str, ...]) -> None:
        was, now = (each.get("user_defined", {}) for each in (saved, self.metadata()))
        if was.get("mask") or was.get("score_mod"):  # format 1 only describes them in words
            raise UserError(f"{workdir} was begun by an older attnlab, which did not save its mask: train it again")
        for name in names:
            before, value = (each.get(name) or None for each in (was, now))
            if (before is None) != (value is None):
                raise UserError(
                    f"{workdir} holds a run with {name} = {before}, but {name} is now {value}: pass the same "
                    f"{name}= in Python, or None"
                )
        for part, code in ((part, code) for part, code in self.code(config).items() if part in names):
            if (record := saved.get("versions", {}).get(part)) is None:
                raise UserError(f"{workdir} was begun by an older attnlab, with other versions of code: train it again")
            if why := code.change(record):
                what = [f"{part} = {now[part]} (then {was[part]})"] if now.get(part) else []
                for name, path in custom.code(config.model).items() if part == "model" else ():
                    what.append(f"{name!r}" + (f" in {path}" if path.name else ""))
                raise UserError(
                    f"the code of {', '.join(what)} has changed since {workdir} began, {why}: restore it, pass the "
                    "run's copy with --import, or choose a new --workdir"
                )

    def precision(self, configured: str) -> str:
        """The precision of a user-defined model; UserError if the config names another."""
        name = type(self.model).__name__
        if (dtype := getattr(self.model, "dtype", None)) is None:
            try:
                shapes = jax.eval_shape(self.model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
            except TypeError:  # `TrainProgram` will raise an error that explains the call
                return "float32"
            # If a module has no `dtype`, Flax computes in the type of its parameters.
            dtype = jnp.result_type(*jax.tree.leaves(shapes))
        actual = jnp.dtype(dtype).name
        if actual not in _PRECISIONS:
            raise UserError(f"{name} computes in {actual}: expected {' or '.join(_PRECISIONS)}")
        if configured not in ("auto", actual) and (configured, actual) != ("tf32", "float32"):
            raise UserError(f"config.precision = {configured!r}, but {name} computes in {actual}: remove it")
        return actual if configured == "auto" else configured


NOTHING = Overrides()


def version(config: RunConfig) -> str:
    """Six hex digits that identify what the config's custom layers compute; "" without custom layers."""
    code = NOTHING.code(config)
    return code["model"].trace()[:6] if code else ""


def with_parts(config: RunConfig, *, layers=None, mask: Mask | None = None, score_mod=None) -> RunConfig:
    """The config with other layers (see `RunConfig.changed`), and with a mask and score mods in all of them.

    Raises:
      UserError: a layer that has no such field, or has another value in it.
    """
    config = config if layers is None else config.changed({"model.layers": layers})
    for name, value in (("mask", mask), ("score_mod", score_mod)):
        for layer in config.model.layers if value is not None else ():
            if name not in {field.name for field in dataclasses.fields(layer)}:
                raise UserError(f"{name}= applies to attention, which {layer.kind} layers do not have: remove it")
            wanted = getattr(type(layer)(**{name: value}), name)
            if (current := getattr(layer, name)) is not None and not records.same(current, wanted):
                raise UserError(f"{name} = {value!r}, but {layer.kind} layers have {current!r}: remove one of them")
        if value is not None:
            config = config.changed({f"model.layers[{n}].{name}": value for n in range(len(config.model.layers))})
    return config


def _shown(model: nn.Module) -> str:
    """A module in a few words, the same in every process."""
    names = (field.name for field in dataclasses.fields(model) if field.name not in ("parent", "name"))
    shown = f"{type(model).__name__}({', '.join(f'{name}={getattr(model, name)!r}' for name in names)})"
    return textwrap.shorten(re.sub(r" at 0x[0-9a-f]+", "", shown), 100, placeholder=" …")
