"""What `import attnlab` loads, that imports only go down, and that every documented example runs."""

import ast
import doctest
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab

PACKAGE = Path(attnlab.__file__).parent
MODULES = [found.name for found in pkgutil.walk_packages([str(PACKAGE)], "attnlab.") if "__main__" not in found.name]
LIGHT = {"attnlab", "jaxtyping", "ml_collections", "tokenizers"}  # neither optax nor orbax, TFDS, grain, matplotlib


def test_importing_attnlab_loads_little_that_jax_and_flax_do_not():
    loaded = "{name.split('.')[0] for name in sys.modules}"
    program = f"import sys, jax, flax; before = {loaded}; import attnlab; print(*({loaded} - before))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert set(out.split()) - sys.stdlib_module_names <= LIGHT


LAYERS = {
    "ops": {"types"},
    "nn": {"ops", "types"},
    "data": {"errors"},
    "config": {"data", "errors", "nn", "ops"},
    "training": {"config", "data", "errors", "nn", "ops", "types"},
    "interop": {"data", "errors", "nn", "ops", "types"},
}


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_only_go_down(layer):
    paths = sorted((PACKAGE / layer).rglob("*.py")) or [PACKAGE / f"{layer}.py"]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module == "attnlab":
                names = [f"attnlab.{alias.name}" for alias in node.names]
            for name in names:
                if name and name.startswith("attnlab."):
                    assert name.split(".")[1] in LAYERS[layer] | {layer}, f"{path.name} imports {name}"


def test_ops_depend_on_jax_alone():
    allowed = {"attnlab", "jax", "jaxtyping", "numpy"} | set(sys.stdlib_module_names)
    for path in (PACKAGE / "ops").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {name.split(".")[0] for name in names} <= allowed, path.name


def surfaces(module):
    """The module, and the modules that are public in it."""
    yield module
    for name in module.__all__:
        if inspect.ismodule(value := getattr(module, name)):
            yield from surfaces(value)


SURFACES = list(surfaces(attnlab))
NAMES = {name: getattr(module, name) for module in SURFACES for name in module.__all__}


def public():
    for module in SURFACES:
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                yield pytest.param(value, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("value", list(public()))
def test_every_public_name_is_documented(value):
    assert value.__doc__ and not value.__doc__.startswith(f"{value.__name__}(")
    if inspect.isclass(value):
        fields = getattr(value, "__dataclass_fields__", ())
        for name, member in vars(value).items():
            is_method = callable(member) or isinstance(member, classmethod | staticmethod | property)
            if is_method and name not in fields and (name == "__call__" or not name.startswith("_")):
                assert inspect.getdoc(getattr(value, name)), name


@pytest.mark.parametrize("value", list(public()))
def test_every_public_name_has_an_example_that_runs_with_public_names_alone(value):
    if value.__module__ == "attnlab.interop.torch" or value is attnlab.interop.huggingface.to_hf:
        pytest.importorskip("torch", reason="torch is not installed")
    names = NAMES | {"jax": jax, "jnp": jnp, "np": np, "Path": Path}
    examples = doctest.DocTestFinder().find(value, value.__name__, module=False, globs=names)
    runs = any(not example.options.get(doctest.SKIP) for test in examples for example in test.examples)
    assert runs, "it has no example"
    for test in examples:
        assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed == 0


@pytest.mark.parametrize("module", [attnlab, attnlab.interop, attnlab.masks, attnlab.nn, attnlab.score_mods], ids=str)
def test_nothing_but_the_public_names_and_submodules_is_seen(module):
    seen = {name for name in dir(module) if not name.startswith("_") and f"{module.__name__}.{name}" not in sys.modules}
    seen.discard("jaxtyping")  # brought by the hook that checks annotations in the tests
    assert seen <= set(module.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_what_is_not_public_run(name):
    if name == "attnlab.bench.torchattention":
        pytest.importorskip("torch")  # it runs under a Python that has it
    module = importlib.import_module(name)
    names = NAMES | {"jax": jax, "jnp": jnp, "np": np, "Path": Path} | vars(module)
    for test in doctest.DocTestFinder().find(module, extraglobs=names):
        owner = test.name.removeprefix(name).strip(".").partition(".")[0]
        if owner not in NAMES or NAMES[owner] is not getattr(module, owner):  # else it has run above
            assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed == 0


def test_the_examples_of_the_readme_run():
    text = (PACKAGE.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(block, names)
    np.testing.assert_allclose(names["last"], names["out"][:, 15:], atol=1e-5)


def test_the_environment_is_described_for_other_projects():
    assert all((path.parent / "__init__.py").exists() for path in PACKAGE.rglob("*.py")), "a wheel would leave it out"
    assert (PACKAGE / "py.typed").exists()
    assert json.loads(json.dumps(attnlab.__all__)) == sorted(attnlab.__all__)
