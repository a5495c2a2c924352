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


@pytest.fixture
def folder(tmp_path):
    """A folder that is not kept: an environment takes a gigabyte."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_another_project_gets_all_it_needs_and_nothing_else(folder):
    environment, constraints = Environment(folder), REPOSITORY / "constraints.txt"
    probe = environment.pip(
        "--retries=1", "--timeout=20", "download", "--no-deps", "-d", folder, "absl-py", check=False
    )
    if probe.returncode:
        pytest.skip(f"no package registry can be reached: {probe.stderr.strip().splitlines()[-1]}")

    # Built from a copy, for a build leaves its traces beside the source.
    source, ignore = folder / "source", (".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(*ignore))
    environment.pip("wheel", "--no-deps", "-w", folder / "wheels", source)
    (wheel,) = (folder / "wheels").iterdir()
    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "attnlab").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }

    environment.pip("install", "--no-compile", "-c", constraints, wheel)
    environment.pip("install", "-c", constraints, source / "tests" / "downstream")
    environment.pip("check")
    installed = environment.run("-c", "import attnlab; print(attnlab.__file__)").stdout
    assert Path(installed.strip()).is_relative_to(folder / "environment")
    for absent in ("pytest", "matplotlib", "tensorflow"):
        assert environment.run("-c", f"import {absent}", check=False).returncode, f"{absent} is there"
    said = environment.run("-W", "error", "-m", "unittest", "discover", "-s", DOWNSTREAM / "tests").stderr
    assert said.rstrip().endswith("OK")

    assert "--config" in environment.run("-m", "attnlab.train", "--help").stdout
    config, workdir = folder / "tiny.py", folder / "run"
    config.write_text(TINY)
    environment.run("-m", "attnlab.train", f"--config={config}", f"--workdir={workdir}")
    assert environment.run("-m", "attnlab.sample", f"--workdir={workdir}", "--max_tokens=5").stdout
    program = f"import attnlab; print(attnlab.load({str(workdir)!r}).config.steps)"
    assert environment.run("-c", program).stdout.strip() == "1"
