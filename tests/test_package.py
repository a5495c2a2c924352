"""Import cost and layering, documentation of the public names, and the examples in docstrings, README and docs."""

import ast
import doctest
import graphlib
import importlib.util
import inspect
import json
import linecache
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab import config
from attnlab.__main__ import COMMANDS

PACKAGE = Path(attnlab.__file__).parent
REPOSITORY = PACKAGE.parent
LIGHT = {"attnlab", "jaxtyping", "ml_collections"}  # neither JAX nor optax, orbax, TFDS, grain, matplotlib


def test_import_is_light_and_first_use_of_a_name_loads_jax():
    loaded = "{name.split('.')[0] for name in sys.modules}"
    program = f"import sys; before = {loaded}; import attnlab; print(*({loaded} - before))"
    program += "; attnlab.attention; assert 'jax' in sys.modules"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert set(out.split()) - sys.stdlib_module_names <= LIGHT


# A file imports from its own folder and from lower floors, but not from other folders on its own floor.
FLOORS = (
    {"types"},
    {"support"},
    {"ops", "data"},
    {"nn", "masks", "score_mods"},
    {"testing"},
    {"generation", "interop"},
    {"config", "compilation"},
    {"experiments"},
    {"training", "commands"},
    {"loading", "records"},
    {"sample", "export", "plots"},
    {"results"},
    {"train", "planning", "see", "study", "bench", "conform"},
    {"sweeping", "plan"},
    {"sweep", "comparing"},
    {"compare"},
    {"__main__"},
)
PEERS = {"jla", "fa4_jax", "cutlass"}
IMPORTABLE = {"ops": {"attnlab", "jax", "jaxtyping", "numpy", *PEERS}, "support": {"attnlab", "jax", "rich"}}


def imports(path: Path) -> set[str]:
    """The modules that a file imports anywhere, and the names that it imports from them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


SOURCES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
SOURCES = {name.removesuffix(".__init__"): path for name, path in SOURCES.items()}
IMPORTS = {name: imports(path) for name, path in SOURCES.items()}


def test_every_unit_has_its_floor():
    assert {name.split(".")[1] for name in SOURCES if name != "attnlab"} == set().union(*FLOORS)


def test_imports_only_go_down():
    floor_of = {unit: number for number, units in enumerate(FLOORS) for unit in units}
    for name, imported in IMPORTS.items():
        for unit in name.split(".")[1:2]:
            others = {module.split(".")[1] for module in imported if module.startswith("attnlab.")}
            for other in others - {unit, "__version__"}:
                assert floor_of[other] < floor_of[unit], f"{name} imports from {other}"


def test_classes_imported_across_folders_have_unique_names():
    """Names may repeat if other folders import only one of the classes: `attnlab.see` has its own `Run`."""
    classes = {}
    for name, path in SOURCES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, set()).add(name)
    for called, modules in classes.items():
        imported = set()
        for module in modules:
            elsewhere = {name for name, names in IMPORTS.items() if f"{module}.{called}" in names}
            imported |= {module for name in elsewhere if name.split(".")[1] != module.split(".")[1]}
        assert len(imported) < 2, f"{called} is the name of classes of {', '.join(sorted(imported))}"


def test_lower_floors_import_only_these_libraries():
    for name, imported in IMPORTS.items():
        for unit in {*name.split(".")[1:2]} & {*IMPORTABLE}:
            assert {module.split(".")[0] for module in imported} - sys.stdlib_module_names <= IMPORTABLE[unit], name


def test_modules_have_no_import_cycles():
    graph = {name: (names & set(IMPORTS)) - {name, "attnlab"} for name, names in IMPORTS.items() if name != "attnlab"}
    for package in {name for name, path in SOURCES.items() if path.name == "__init__.py"}:  # without its `__init__`
        for name in graph:
            if any(module.startswith(f"{package}.") for module in graph[name]):
                graph[name] = graph[name] - {package}
    graphlib.TopologicalSorter(graph).prepare()


def surfaces(module):
    """Yield the module and the public modules in it."""
    yield module
    for name in module.__all__:
        if inspect.ismodule(value := getattr(module, name)):
            yield from surfaces(value)


SURFACES = list(surfaces(attnlab))
NAMES = {name: getattr(module, name) for module in SURFACES for name in module.__all__}
PUBLIC = {
    f"{module.__name__}.{name}": value
    for module in SURFACES
    for name in module.__all__
    if callable(value := getattr(module, name))
}


def documented():
    """Yield the other names in the reference in `docs/`: documented, but subject to change."""
    for page in (REPOSITORY / "docs" / "reference").glob("*.md"):
        for path, members in re.findall(r"^::: (\S+)\n(?:.*members: \[(.*)\])?", page.read_text(), re.MULTILINE):
            for name in members.split(", ") if members else [""]:
                value = pkgutil.resolve_name(f"{path}.{name}".rstrip("."))
                if not inspect.ismodule(value) and callable(value) and value not in PUBLIC.values():
                    yield f"{path}.{name}".rstrip("."), value


def test_public_names_have_docstrings():
    for name, value in PUBLIC.items():
        assert value.__doc__ and not value.__doc__.startswith(f"{value.__name__}("), name
        fields = getattr(value, "__dataclass_fields__", ())
        for member, part in vars(value).items() if inspect.isclass(value) else ():
            is_method = callable(part) or isinstance(part, classmethod | staticmethod | property)
            if is_method and member not in fields and (member == "__call__" or not member.startswith("_")):
                assert inspect.getdoc(getattr(value, member)), f"{name}.{member}"


def run_examples(name, value, **names) -> bool:
    """Run the examples in the docstrings of a name and its methods, with extra globals; returns whether any exist."""
    names = NAMES | {"jax": jax, "jnp": jnp, "np": np, "Path": Path} | names
    examples = doctest.DocTestFinder().find(value, name, module=False, globs=names)
    for test in examples:
        assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed == 0, name
    return any(not example.options.get(doctest.SKIP) for test in examples for example in test.examples)


@pytest.mark.parametrize("with_models", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_public_names_have_examples_that_run(with_models):
    """In one process, so that examples share the programs of single operations; examples of models compile most."""
    has_torch = importlib.util.find_spec("torch") is not None
    for name, value in PUBLIC.items():
        needs_torch = "torch" in name or name.endswith("to_hf")
        if value.__module__.startswith("attnlab.ops") != with_models and (has_torch or not needs_torch):
            assert run_examples(name, value), f"the docstring of {name} has no example"


@pytest.mark.slow
def test_documented_examples_of_other_names_run():
    assert sum([run_examples(name, value, **vars(sys.modules[value.__module__])) for name, value in documented()]) > 20


@pytest.mark.parametrize("module", [attnlab, attnlab.interop, attnlab.masks, attnlab.nn, attnlab.score_mods], ids=str)
def test_namespace_holds_only_public_names_and_submodules(module):
    names = {name for name in dir(module) if not name.startswith("_")}
    names -= {name for name in names if f"{module.__name__}.{name}" in sys.modules}
    names.discard("jaxtyping")  # added by the import hook that checks annotations in the tests
    assert names <= set(module.__all__)


PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a page in one language."""
    fenced = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


def pages_with_python():
    """The README, and the pages of `docs/` as slow cases."""
    for page in PAGES:
        if blocks(page, "python"):
            yield pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.parent != REPOSITORY else [])


@pytest.mark.parametrize("page", list(pages_with_python()))
def test_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for n, block in enumerate(blocks(page, "python")):
        name = f"<{page.name} {n}>"
        linecache.cache[name] = len(block), None, block.splitlines(True), name  # as IPython does for a notebook's cell
        exec(compile(block, name, "exec"), names)


def test_coverage_names_paths_that_exist():
    for path in re.findall(r"`([\w/]+(?:\.py|/))`", (REPOSITORY / "docs" / "coverage.md").read_text(encoding="utf-8")):
        assert any((folder / path).exists() for folder in (PACKAGE, REPOSITORY / "tests", REPOSITORY)), path


def test_readme_fits_a_screen_and_its_pictures_are_small():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    pictures = [REPOSITORY / path for path in re.findall(r'<img src="([^"]+)"', text)]
    assert pictures and sum(path.stat().st_size for path in pictures) <= 300_000
    assert len(text.splitlines()) <= 80


def documented_commands():
    """Every command line of attnlab in README and docs, as words from the subcommand on."""
    for page in PAGES:
        for line in "".join(blocks(page, "")).splitlines():
            line = re.sub(r"^\S*python3? -m attnlab\.|^(\.venv/bin/)?attnlab ", "attnlab ", line.split(" #")[0])
            if line.startswith("attnlab "):
                yield shlex.split(line)[1:]


def test_documented_commands_and_options_exist(capsys):
    commands = {tuple(command) for command in documented_commands()}
    assert len(commands) > 10
    for command, *options in commands:
        target = [options.pop(0)] if command in ("bench", "study") else []
        module = importlib.import_module(COMMANDS[command][0])
        assert module.main([f"attnlab {command}", *target, "--help"]) == 0, command
        text = capsys.readouterr().out
        for option in options:
            if not option.startswith("--"):  # the value of the option before it
                continue
            name, _, value = option.removeprefix("--").partition("=")
            if name == "config":
                assert (REPOSITORY / "configs" / f"{value.split(':')[0]}.py").exists(), option
            elif name.startswith("config."):
                assert name.removeprefix("config.") in config.declared(), option
            else:
                assert re.search(rf"--(\[no\])?{name}\b", text), f"{command}: {option}"


def test_version_and_license_are_the_same_in_all_files():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert "version" in project["dynamic"]
    changes, citation, license = (
        (REPOSITORY / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff", "LICENSE")
    )
    assert re.search(r"^## (\S+)", changes, re.MULTILINE)[1] == attnlab.__version__
    assert f"\nversion: {attnlab.__version__}\n" in citation and "\nlicense: Apache-2.0\n" in citation
    assert "Apache License\n                           Version 2.0" in license


def test_package_is_typed_and_has_no_namespace_packages():
    assert all((path.parent / "__init__.py").exists() for path in PACKAGE.rglob("*.py")), "a folder without __init__.py"
    assert (PACKAGE / "py.typed").exists()
    assert json.loads(json.dumps(attnlab.__all__)) == sorted(attnlab.__all__)


def test_documented_layout_matches_the_tree():
    lines = "".join(blocks(REPOSITORY / "docs" / "development.md", "text")).splitlines()
    documented = {line.split()[0] for line in lines}
    folders = {f"attnlab/{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")} | {"attnlab/*.py"}
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True).stdout.splitlines()
    outside = {path.split("/")[0] for path in tracked if "/" in path and not path.startswith(".")} - {"attnlab"}
    assert documented == folders | outside
