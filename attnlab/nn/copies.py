"""The source that a run copies for a user-defined layer: what the layer uses of its file or its notebook's cells."""

import ast
import contextlib
import inspect
import linecache
import symtable
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from attnlab.support import files as contents
from attnlab.support.errors import UserError


def cell(file: str) -> str:
    """The text of a notebook cell, by the file name in its code objects; "" for a real file."""
    return "" if Path(file).exists() else "".join(linecache.getlines(file))


def functions(value) -> list[FunctionType]:
    """The function that a value is or wraps; for a class, its methods."""
    values = vars(value).values() if isinstance(value, type) else [value]
    return [inspect.unwrap(each) for each in values if callable(each) and inspect.isfunction(inspect.unwrap(each))]


def source_of(value, code) -> tuple[str, Path, str]:
    """(Name of a class or function, path of its file, the file's text or, for notebook code, the statements it uses).

    Args:
      code: `value` itself; for a `LayerConfig`, the class of its layers, which has the methods.

    Raises:
      UserError: `value` is defined in no readable file, and none of its methods in a notebook cell.
    """
    name, top = value.__name__, value.__qualname__.partition(".")[0]  # or the function around it
    for function in functions(code):
        text = cell(function.__code__.co_filename)
        if any(top in _defined(node) for node in ast.parse(text).body):
            return name, Path(f"{name}.py"), reached(_with_other_cells(text, function.__globals__), [name])
    try:
        path = Path(inspect.getsourcefile(sys.modules.get(value.__module__) or functions(code)[0])).absolute()
    except (TypeError, OSError, IndexError) as error:
        remedy = "define it in a file, or in a cell without %%, so that a run can find it"
        raise UserError(f"{value!r} is defined neither in a file nor in a notebook cell: {remedy}") from error
    return name, path, text_of(path)


def text_of(path: Path) -> str:
    """The text of a Python file; UserError if it cannot be read."""
    try:
        return contents.read(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', error)}: expected a Python file") from error


def reached(text: str, names: Sequence[str]) -> str:
    """The definitions of some names in a Python file and of everything that these use, in file order.

    Statements that define or change nothing are copied only before the first of `names`; code for scripts never is.

    >>> print(reached("base, other = 2, 3\\nthird = 1\\ndef f(x):\\n    return base * x\\nprint(f(base))", ["f"]))
    base, other = 2, 3
    def f(x):
        return base * x
    """
    body = [node for node in ast.parse(text).body if not _is_of_script(node)]
    defined = {each: [node for node in body if each in _defined(node)] for node in body for each in _defined(node)}
    wanted = [name for name in names if name in defined] or list(defined)  # all for a class in a function
    end = min((body.index(defined[name][0]) for name in wanted), default=len(body))
    nodes = {node.lineno: node for node in body[:end] if not _defined(node)}
    wanted += [each.id for node in nodes.values() for each in ast.walk(node) if isinstance(each, ast.Name)]
    while wanted:
        for node in defined.get(wanted.pop(), ()):
            if node.lineno not in nodes:
                nodes[node.lineno] = node
                wanted += [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
    lines = text.splitlines()
    first = {
        at: min(each.lineno for each in (node, *getattr(node, "decorator_list", ()))) for at, node in nodes.items()
    }
    return "\n".join("\n".join(lines[first[at] - 1 : nodes[at].end_lineno]) for at in sorted(nodes))


def _is_of_script(node) -> bool:
    """Whether a statement is only for a script or a notebook."""
    shown = ast.unparse(node.test if isinstance(node, ast.If) else node)
    return (isinstance(node, ast.If) and "__name__" in shown) or "get_ipython()" in shown


def _defined(node) -> set[str]:
    """The names that a statement defines or changes; none for `from x import *` and `__future__`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        return set() if "*" in names or getattr(node, "module", "") == "__future__" else names
    inner = (_defined(each) for each in ast.iter_child_nodes(node))
    changed = isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
    return set().union(*inner, {each.id for each in ast.walk(node) if changed and isinstance(each, ast.Name)})


def _with_other_cells(text: str, names: Mapping[str, Any]) -> str:
    """A cell's text, preceded by the statements of other cells that define the names it uses."""
    defined, parts = {each for node in ast.parse(text).body for each in _defined(node)}, []

    def add(text: str) -> None:
        for name in sorted(_globals(symtable.symtable(text, "cell", "exec")) & {*names} - defined):
            if name not in defined:
                defined.add(name)
                add(_definition(name, names[name]))
        parts.append(text)

    add(text)
    return "\n".join(parts)


def _globals(table: symtable.SymbolTable) -> set[str]:
    """The global names that a text refers to."""
    is_class = table.get_type() == "class"  # its body may read a global and define the same name
    symbols = (each for each in table.get_symbols() if each.is_referenced() and (each.is_global() or is_class))
    return {symbol.get_name() for symbol in symbols}.union(*map(_globals, table.get_children()))


def _definition(name: str, value) -> str:
    """The statement that defines a name: a literal, or code from its own cell, else the newest cell; "" for none."""
    with contextlib.suppress(ValueError, SyntaxError, MemoryError):
        return f"{name} = {ast.literal_eval(repr(value))!r}"
    filenames = [function.__code__.co_filename for function in functions(value)]
    for text in map(cell, [*filenames, *reversed(linecache.cache)]):
        with contextlib.suppress(SyntaxError):
            for node in reversed(ast.parse(text).body):
                if name in _defined(node):
                    return ast.unparse(node)
    return ""
