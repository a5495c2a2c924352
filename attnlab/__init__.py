"""Attention for JAX and Flax: an exact, memory-efficient operator, and the modules and tools built on it."""

import importlib as _importlib
import typing as _typing

from attnlab.support import startup as _startup

_startup.handle_interrupts()

if _typing.TYPE_CHECKING:
    from attnlab import interop, masks, nn, score_mods, see
    from attnlab.generation.scoring import score
    from attnlab.loading import load
    from attnlab.ops.attention import attention, attention_weights, explain, implementations, merge
    from attnlab.ops.context import context_parallel
    from attnlab.ops.linear import LinearState, linear_attention
    from attnlab.ops.recurrence import linear_recurrence
    from attnlab.ops.stick_breaking import stick_breaking_attention, stick_breaking_weights
    from attnlab.runs import metrics

__all__ = [
    "LinearState",
    "attention",
    "attention_weights",
    "comparing",
    "context_parallel",
    "explain",
    "implementations",
    "interop",
    "linear_attention",
    "linear_recurrence",
    "load",
    "masks",
    "merge",
    "metrics",
    "nn",
    "score",
    "score_mods",
    "see",
    "stick_breaking_attention",
    "stick_breaking_weights",
]

__version__ = "0.1.0"

# Names are imported when they are first used: a command can then answer, or restart itself, before it loads JAX.
_MODULES = dict.fromkeys(("attention", "attention_weights", "explain", "implementations", "merge"), "ops.attention")
_MODULES["context_parallel"] = "ops.context"
_MODULES |= {"LinearState": "ops.linear", "linear_attention": "ops.linear", "load": "loading", "metrics": "runs"}
_MODULES["linear_recurrence"] = "ops.recurrence"
_MODULES["score"] = "generation.scoring"
_MODULES |= dict.fromkeys(("stick_breaking_attention", "stick_breaking_weights"), "ops.stick_breaking")


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}")
    globals()[name] = value = getattr(module, name) if name in _MODULES else module
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
