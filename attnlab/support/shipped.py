"""The folders `configs`, `studies` and `benchmarks`: beside the package in a checkout, within it in a wheel."""

import ast
import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parents[1]


def files(folder: str) -> dict[str, Path]:
    """The Python files of a shipped folder by name; names that begin with an underscore are not listed."""
    return {file.stem: file for file in sorted(_place(folder).glob("*.py")) if not file.name.startswith("_")}


def summary(file: Path) -> str:
    """The first line of a file's docstring, without importing it."""
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))).splitlines()[0]


def strings(file: Path, name: str) -> list[str]:
    """The strings in the tuple that a file assigns to a name, without importing the file; [] for none."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return list(ast.literal_eval(node.value)) if isinstance(node.value, ast.Tuple) else []
    return []


def module(folder: str, name: str) -> ModuleType:
    """Import a file of a shipped folder as part of a package, because its imports of neighbours are relative."""
    return importlib.import_module(f"attnlab._{folder}.{name}")


def _place(folder: str) -> Path:
    installed = PACKAGE / f"_{folder}"
    return installed if installed.is_dir() else PACKAGE.parent / folder


for _folder in ("studies", "benchmarks"):  # packages with the names that they have in a wheel
    _spec = ModuleSpec(f"attnlab._{_folder}", None, is_package=True)
    _spec.submodule_search_locations = [str(_place(_folder))]
    sys.modules.setdefault(_spec.name, importlib.util.module_from_spec(_spec))
