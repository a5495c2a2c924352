"""The built wheel in a fresh environment, used by another project through public names alone."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import types
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    """Yield every public name, from "attnlab.attention" to "attnlab.nn.GPT"."""
    for name in attnlab.__all__:
        value = getattr(attnlab, name)
        yield f"attnlab.{name}"
        if isinstance(value, types.ModuleType):
            yield from (f"attnlab.{name}.{inner}" for inner in value.__all__)


def used_names(program: str):
    """Yield the full names that a program imports from attnlab, or reads as attributes of its modules."""
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


def test_downstream_project_uses_only_public_names():
    allowed = {"attnlab", *public_names()}
    used = {name for path in DOWNSTREAM.rglob("*.py") for name in used_names(path.read_text())}
    assert used - allowed == set()
    terms = {"attention", "merge", "masks.Padding", "nn.KVCache", "nn.Block"}
    assert {f"attnlab.{name}" for name in terms} <= used


def closure(requirement: Requirement, found: dict[tuple[str, str], metadata.Distribution]) -> None:
    """Add the distributions that a requirement brings, by (name, extra)."""
    name = canonicalize_name(requirement.name)
    for extra in {"", *requirement.extras} - {extra for key, extra in found if key == name}:
        found[name, extra] = metadata.distribution(name)
        for line in found[name, extra].requires or ():
            inner = Requirement(line)
            if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                closure(inner, found)


class Environment:
    """A virtual environment with a project's declared dependencies, whose commands run in an empty folder.

    Dependencies are links to the distributions installed beside the tests: no download, and nothing undeclared.
    """

    def __init__(self, folder: Path, requirements: list[str]):
        self.folder = folder
        venv.create(folder / "environment", with_pip=False)
        self.python = folder / "environment" / ("Scripts" if os.name == "nt" else "bin") / "python"
        (folder / "empty").mkdir()
        site = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
        found = {}
        for requirement in requirements:
            closure(Requirement(requirement), found)
        for distribution in {name: value for (name, _), value in found.items()}.values():
            for file in distribution.files:
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    (site / file).parent.mkdir(parents=True, exist_ok=True)
                    (site / file).symlink_to(file.locate())

    def run(self, *command, check: bool = True) -> subprocess.CompletedProcess:
        """Run `python command…`; a failure shows its output."""
        return self._run([self.python, *map(str, command)], check)

    def pip(self, *arguments) -> subprocess.CompletedProcess:
        """Run `pip arguments…` for this environment, with the pip, hatchling and setuptools of the tests."""
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, *arguments]
        return self._run(list(map(str, command)), check=True)

    def _run(self, command, check):
        names = ("PYTHON", "XLA_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        done = subprocess.run(command, cwd=self.folder / "empty", env=environment, capture_output=True, text=True)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.mark.slow
def test_wheel_installs_and_runs_in_a_fresh_environment(tmp_path):
    # Built from a copy: a build leaves files beside the source.
    source, ignore = tmp_path / "source", (".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(*ignore))
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    environment = Environment(tmp_path, project["dependencies"])
    for built in (source, source / "tests" / "downstream"):
        build = ["wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", tmp_path / "wheels"]
        subprocess.run([sys.executable, "-m", "pip", *build, built], check=True)
    (wheel,) = (tmp_path / "wheels").glob("attnlab-*.whl")
    metadata_file = f"attnlab-{attnlab.__version__}.dist-info/METADATA"
    with zipfile.ZipFile(wheel) as archive:
        assert "License-Expression: Apache-2.0" in archive.read(metadata_file).decode().splitlines()
    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "attnlab").rglob("*")
        if path.suffix in (".py", ".pyi", ".html", ".css", ".js") or path.name == "py.typed"
    } | {
        f"attnlab/_{path.relative_to(REPOSITORY).as_posix()}"
        for folder in ("configs", "studies", "benchmarks")
        for path in (REPOSITORY / folder).rglob("*.py")
    }

    environment.pip("install", "--no-deps", "--no-index", *(tmp_path / "wheels").iterdir())
    environment.pip("check")
    installed = environment.run("-c", "import attnlab; print(attnlab.__file__)").stdout
    assert Path(installed.strip()).is_relative_to(tmp_path / "environment")
    for absent in ("pytest", "matplotlib", "tensorflow"):
        assert environment.run("-c", f"import {absent}", check=False).returncode, f"{absent} is there"
    said = environment.run("-W", "error", "-m", "unittest", "discover", "-s", DOWNSTREAM / "tests").stderr
    assert said.rstrip().endswith("OK")

    script = environment.python.with_name("attnlab")
    assert "--config" in environment.run(script, "train", "--help").stdout
    named = environment.run(script, "train", "--config=sancho:tiny", "--config.steps=0", check=False)
    assert named.stderr == "error: config.steps = 0: expected 1 or more, below 2^31\n"
    assert "matrix products" in environment.run(script, "bench").stdout
    refused = environment.run(script, "study", "scaling", check=False)
    assert "matplotlib" in refused.stderr  # which the studies need
    config, workdir = tmp_path / "tiny.py", tmp_path / "run"
    config.write_text(TINY)
    environment.run("-m", "attnlab.train", f"--config={config}", f"--workdir={workdir}")
    assert environment.run("-m", "attnlab.sample", f"--workdir={workdir}", "--max_tokens=5").stdout
    program = f"import attnlab; print(attnlab.load({str(workdir)!r}).config.steps)"
    assert environment.run("-c", program).stdout.strip() == "1"
