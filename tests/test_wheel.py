"""What another project gets: the wheel, in an environment with nothing but what it declares, and public names alone."""

import ast
import os
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

import attnlab

REPOSITORY = Path(__file__).parents[1]
DOWNSTREAM = Path(__file__).parent / "downstream"
TINY = """
from attnlab.config import default

def get_config():
    config = default()
    config.steps = 1
    config.batch_size = 2
    config.model.update(num_layers=1, num_heads=2, width=16, context=16)
    config.eval.windows = 1
    config.sample.length = 1
    return config
"""


def public_names():
    """Every name that other projects may rely on, from "attnlab.attention" to "attnlab.nn.GPT"."""
    for name in attnlab.__all__:
        value = getattr(attnlab, name)
        yield f"attnlab.{name}"
        if isinstance(value, types.ModuleType):
            yield from (f"attnlab.{name}.{inner}" for inner in value.__all__)


def used_names(program: str):
    """What a program takes of attnlab, as full names: what it imports, and what it reads off modules it imported."""
    tree, modules = ast.parse(program), {"attnlab": "attnlab"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "attnlab":
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "attnlab":
                    modules[alias.asname or "attnlab"] = alias.name if alias.asname else "attnlab"
                    yield alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            owner = modules[node.value.id]
            if owner == "attnlab" or isinstance(getattr(attnlab, owner.partition(".")[2], None), types.ModuleType):
                yield f"{owner}.{node.attr}"


def test_the_other_project_uses_public_names_alone():
    allowed = {"attnlab", *public_names()}
    used = {name for path in DOWNSTREAM.rglob("*.py") for name in used_names(path.read_text())}
    assert used - allowed == set()
    terms = {"attention", "attention_weights", "explain", "merge", "masks.Padding", "nn.KVCache", "nn.Block"}
    assert {f"attnlab.{name}" for name in terms} <= used


@pytest.mark.parametrize(
    "program, name",
    [
        ("from attnlab.ops.attention import attention", "attnlab.ops.attention.attention"),
        ("import attnlab.ops", "attnlab.ops"),
        ("import attnlab\nattnlab.loading", "attnlab.loading"),
        ("from attnlab import masks as m\nm.as_band", "attnlab.masks.as_band"),
        ("import attnlab.nn as layers\nlayers.gpt", "attnlab.nn.gpt"),
    ],
)
def test_a_private_name_is_found(program, name):
    assert name in set(used_names(program)) - set(public_names())


class Environment:
    """A virtual environment whose commands run in an empty folder, out of sight of the working tree."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.python = folder / "environment" / ("Scripts" if os.name == "nt" else "bin") / "python"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "environment")], check=True)

    def run(self, *command, check: bool = True) -> subprocess.CompletedProcess:
        """`python command…`; a failure shows what was said."""
        here = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA_"))}
        (self.folder / "empty").mkdir(exist_ok=True)
        done = subprocess.run(
            [self.python, *map(str, command)], cwd=self.folder / "empty", env=here, capture_output=True, text=True
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def pip(self, *arguments, check: bool = True) -> subprocess.CompletedProcess:
        """`pip arguments…`"""
        return self.run("-m", "pip", "--disable-pip-version-check", *arguments, check=check)


@pytest.fixture(scope="module")
def wheel_and_environment(tmp_path_factory):
    """The wheel, and an environment with it, what it declares, and the other project."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = Environment(folder)
    constraints = REPOSITORY / "constraints.txt"
    probe = environment.pip(
        "--retries=1", "--timeout=20", "download", "--no-deps", "-d", folder, "-c", constraints, "absl-py", check=False
    )
    if probe.returncode:
        pytest.skip(f"no package registry can be reached: {probe.stderr.strip().splitlines()[-1]}")
    # Copies, for a build leaves its traces beside the source.
    ignore = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
    shutil.copytree(REPOSITORY, folder / "source", ignore=ignore)
    environment.pip("wheel", "--no-deps", "-w", folder / "wheels", folder / "source")
    (wheel,) = (folder / "wheels").iterdir()
    environment.pip("install", "-c", constraints, wheel)
    environment.pip("install", "-c", constraints, folder / "source" / "tests" / "downstream")
    return wheel, environment


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel_and_environment):
    wheel, _ = wheel_and_environment
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {
        str(path.relative_to(REPOSITORY).as_posix())
        for path in (REPOSITORY / "attnlab").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }


@pytest.mark.slow
def test_what_is_installed_is_what_is_declared_and_is_not_the_working_tree(wheel_and_environment):
    _, environment = wheel_and_environment
    environment.pip("check")
    here = environment.run("-c", "import attnlab; print(attnlab.__file__)").stdout
    assert Path(here.strip()).is_relative_to(environment.folder)
    for absent in ("pytest", "matplotlib", "tensorflow"):
        assert environment.run("-c", f"import {absent}", check=False).returncode, f"{absent} is there"


@pytest.mark.slow
def test_the_other_project_passes_its_tests(wheel_and_environment):
    _, environment = wheel_and_environment
    said = environment.run("-W", "error", "-m", "unittest", "discover", "-s", DOWNSTREAM / "tests").stderr
    assert said.rstrip().endswith("OK")


@pytest.mark.slow
def test_the_commands_run_where_it_is_installed(wheel_and_environment, tmp_path):
    _, environment = wheel_and_environment
    assert "--config" in environment.run("-m", "attnlab.train", "--help").stdout
    config, workdir = tmp_path / "tiny.py", tmp_path / "run"
    config.write_text(TINY)
    environment.run("-m", "attnlab.train", f"--config={config}", f"--workdir={workdir}")
    assert (workdir / "metrics.jsonl").stat().st_size
    assert environment.run("-m", "attnlab.sample", f"--workdir={workdir}", "--max_tokens=5").stdout
    program = f"import attnlab; print(attnlab.load({str(workdir)!r}).config.steps)"
    assert environment.run("-c", program).stdout.strip() == "1"
