"""Attention for JAX and Flax: an exact, memory-efficient operator, and the modules and tools built on it."""

import ast as _ast
import importlib as _importlib
import pkgutil as _pkgutil

__version__ = "0.1.0"

# Public names are imported on first use, so that a command can answer before it loads JAX.
_SOURCES = {
    alias.name: node.module
    for node in _ast.parse(_pkgutil.get_data(__name__, "__init__.pyi")).body
    if isinstance(node, _ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_SOURCES)


def __getattr__(name: str):
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    source = _SOURCES[name]
    is_module = source == __name__
    value = _importlib.import_module(f"{source}.{name}" if is_module else source)
    globals()[name] = value = value if is_module else getattr(value, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
