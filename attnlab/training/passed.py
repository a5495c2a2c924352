"""Values that a user passes to `attnlab.train.train`, and the user's code that a run computes with."""

import dataclasses
import re
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from attnlab.config import RunConfig
from attnlab.nn import GPT, ModelConfig, custom, versions
from attnlab.ops.masks import Mask
from attnlab.ops.score_mods import ScoreMods
from attnlab.support.errors import UserError

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
        """The entry "user_defined" of `config.json`, values in words; {} where nothing is passed."""
        values = {name: value for name, value in self.of_experiment().items() if value is not None}
        found = {"model": None, "optimizer": False} | {name: _shown(value) for name, value in values.items()}
        return {"user_defined": found} if values else {}

    def code(self, config: RunConfig) -> dict[str, versions.Code]:
        """The code of the user that a run computes with: "model" and "optimizer", of those that have any."""
        found, packed = {}, config.data.packing == "documents"
        model = with_parts(config.model, self.mask, self.score_mod) if self.model is None else self.model
        if model is not config.model or custom.kinds(config.model):
            found["model"] = versions.of_model(model, config.model.context, packed)
        if self.optimizer is not None:
            module = GPT(model) if isinstance(model, ModelConfig) else model
            params = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
            found["optimizer"] = versions.of_optimizer(self.optimizer, params)
        return found

    def check_continues(self, saved: Mapping, config: RunConfig, workdir) -> None:
        """Raise UserError unless the run in a workdir, with the `config.json` of `saved`, has the same code."""
        self._check(saved, config, workdir, ("model", "mask", "score_mod", "optimizer"))

    def check_reads(self, saved: Mapping, config: RunConfig, workdir) -> None:
        """Raise UserError unless the run in a workdir was trained with the same model, mask and score mod."""
        self._check(saved, config, workdir, ("model", "mask", "score_mod"))

    def _check(self, saved: Mapping, config: RunConfig, workdir, names: tuple[str, ...]) -> None:
        was, now = (each.get("user_defined", {}) for each in (saved, self.metadata()))
        for name in names:
            before, value = (each.get(name) or None for each in (was, now))
            if (before is None) != (value is None):
                raise UserError(
                    f"{workdir} holds a run with {name} = {before}, and {name}= gives {value}: pass the same in "
                    f"Python, {name}=…, or None"
                )
        for part, code in self.code(config).items():
            if (record := saved.get("versions", {}).get(part)) is None:
                raise UserError(f"{workdir} was begun by an older attnlab, with other versions of code: train it again")
            if part in ("model", *names) and (why := code.change(record)):
                kinds = custom.kinds(config.model).items() if part == "model" else ()
                passed = [name for name in names if now.get(name) and (name == "optimizer") == (part == "optimizer")]
                what = [f"{kind!r}" + (f" in {path}" if path.name else "") for kind, path in kinds]
                what += [f"{name} = {now[name]} (then {was[name]})" for name in passed]
                raise UserError(
                    f"the code of {', '.join(what)} has changed since {workdir} began, {why}: restore it, pass the "
                    "run's copy by --import, or choose a new --workdir"
                )

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


def version(config: RunConfig) -> str:
    """Six hex digits of what the config's custom layers compute; "" without such."""
    code = NOTHING.code(config)
    return code["model"].trace()[:6] if code else ""


def with_parts(config: ModelConfig, mask: Mask | None, score_mod) -> ModelConfig:
    """The config with a mask and score mods in all layers; UserError for a layer that has none."""
    for name, value in (("mask", mask), ("score_mod", score_mod)):
        if value is None:
            continue
        if others := [layer.kind for layer in config.used if name not in {f.name for f in dataclasses.fields(layer)}]:
            raise UserError(f"{name}= is for attention, and layers of {others[0]} have none: leave it out")
        config = config.replace(layers=tuple(dataclasses.replace(layer, **{name: value}) for layer in config.layers))
    return config


def _shown(value: Any) -> str:
    """A value in a few words, the same in every process."""
    if isinstance(value, optax.GradientTransformation):
        return "a user's"
    if isinstance(value, nn.Module):
        names = (field.name for field in dataclasses.fields(value) if field.name not in ("parent", "name"))
        shown = f"{type(value).__name__}({', '.join(f'{name}={getattr(value, name)!r}' for name in names)})"
    else:
        shown = getattr(value, "__qualname__", None) or repr(value)
    return textwrap.shorten(re.sub(r" at 0x[0-9a-f]+", "", shown), 100, placeholder=" …")
