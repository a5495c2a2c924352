"""The built wheel in a fresh environment: public names suffice to use it, and the README's commands run as printed."""

import ast
import os
import re
import shlex
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


def closure(requirement: Requirement, distributions: dict[tuple[str, str], metadata.Distribution]) -> None:
    """Add the distributions that a requirement pulls in, by (name, extra)."""
    name = canonicalize_name(requirement.name)
    for extra in {"", *requirement.extras} - {extra for key, extra in distributions if key == name}:
        distributions[name, extra] = metadata.distribution(name)
        for line in distributions[name, extra].requires or ():
            inner = Requirement(line)
            if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                closure(inner, distributions)


class Environment:
    """A virtual environment with a project's declared dependencies, whose commands run in the folder `work` around it.

    Dependencies are links to the distributions that the tests run with: no download, and nothing undeclared.
    """

    def __init__(self, folder: Path, *requirements: str):
        self.work = folder / "work"
        venv.create(self.work / ".venv", with_pip=False)
        self.python = self.work / ".venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
        self.site = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
        self.link(*requirements)

    def link(self, *requirements: str) -> None:
        """Link the distributions that requirements such as "attnlab[plots]" pull in, except attnlab itself."""
        distributions = {}
        for requirement in requirements:
            closure(Requirement(requirement), distributions)
        for distribution in {name: value for (name, _), value in distributions.items() if name != "attnlab"}.values():
            for file in distribution.files:
                path = self.site / file
                if ".." not in file.parts and "__pycache__" not in file.parts and not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.symlink_to(file.locate())
                    cache, theirs = path.parent / "__pycache__", Path(file.locate()).parent / "__pycache__"
                    if theirs.is_dir() and not cache.is_symlink():
                        cache.symlink_to(theirs)  # same interpreter, so nothing is compiled again

    def run(self, *command, check: bool = True) -> subprocess.CompletedProcess:
        """Run `python command…`; a failure shows its output."""
        return self._run([self.python, *map(str, command)], check)

    def pip(self, *arguments) -> subprocess.CompletedProcess:
        """Run `pip arguments…` for this environment, with the pip, hatchling and setuptools of the tests."""
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, *arguments]
        return self._run(list(map(str, command)), check=True)

    def shell(self, line: str) -> subprocess.CompletedProcess:
        """Run a shell line with this environment's commands; a failure shows its output."""
        path, flags = shlex.quote(str(self.python.parent)), "--xla_backend_optimization_level=0"
        line = f"PATH={path}:$PATH; export XLA_FLAGS={flags}; {line}"
        return self._run(["bash", "-c", line], check=True)

    def _run(self, command, check):
        names = ("PYTHON", "XLA_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        done = subprocess.run(command, cwd=self.work, env=environment, capture_output=True, text=True)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A folder with the wheels of attnlab and of the downstream project."""
    # Built from a copy: a build leaves files beside the source.
    folder, ignore = tmp_path_factory.mktemp("built"), (".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
    shutil.copytree(REPOSITORY, folder / "source", ignore=shutil.ignore_patterns(*ignore))
    for built in (folder / "source", folder / "source" / "tests" / "downstream"):
        build = ["wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder / "wheels"]
        subprocess.run([sys.executable, "-m", "pip", *build, built], check=True)
    return folder / "wheels"


@pytest.mark.slow
def test_wheel_installs_and_runs_in_a_fresh_environment(wheels, tmp_path):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    environment = Environment(tmp_path, *project["dependencies"])
    (wheel,) = wheels.glob("attnlab-*.whl")
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

    environment.pip("install", "--no-deps", "--no-index", *wheels.iterdir())
    environment.pip("check")
    installed = environment.run("-c", "import attnlab; print(attnlab.__file__)").stdout
    assert Path(installed.strip()).is_relative_to(environment.work / ".venv")
    for absent in ("pytest", "matplotlib", "tensorflow"):
        assert environment.run("-c", f"import {absent}", check=False).returncode, f"{absent} is there"
    said = environment.run("-W", "error", "-m", "unittest", "discover", "-s", DOWNSTREAM / "tests").stderr
    assert said.rstrip().endswith("OK")

    script = environment.python.with_name("attnlab")
    named = environment.run(script, "train", "--config=sancho:tiny", "--config.steps=0", check=False)
    assert named.stderr == "error: config.steps = 0: expected 1 or more, below 2^31\n"
    assert "matrix products" in environment.run(script, "bench").stdout
    refused = environment.run(script, "study", "scaling", check=False)
    assert "matplotlib" in refused.stderr  # the studies need it


README, LAUNCH = ((REPOSITORY / name).read_text(encoding="utf-8") for name in ("README.md", "launch/README.md"))
FEWER = {  # flags that shorten a command and need no other package
    "train": "--config.steps=2 --config.model.num_layers=1 --config.eval.windows=1 --config.sample.length=1",
    "config=gpt_30m": "--config.data.vocab_size=300 --config.model.context=32",
    "compare": "--config.steps=1 --config.model.num_layers=1 --learning_rates=1e-3 --extensions=0",
    "sample": "--max_tokens=2",
}


def block(heading: str) -> str:
    """The first code block below a heading of the README."""
    return re.search(rf"^## {heading}\n```\w*\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]


def lines_of(*texts: str):
    """Yield lines of commands; for `make TARGET`, the lines that it runs in a fresh clone without a GPU."""
    for line in "\n".join(texts).splitlines():
        command = ["make", "--dry-run", *line.split(" #")[0].split()[1:], "VENV=.fresh", "CUDA="]
        if line.startswith("make"):
            output = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
            yield from output.replace(".fresh", ".venv").splitlines()
        else:
            yield line


NOTEBOOK = block("In a notebook").replace('"quickstart"', '"tiny.py"').replace("seeds=3", "seeds=2")
ROADS = {  # a test does not run the tests
    "laptop": (block("On a laptop").replace("make test", ""), re.search("attnlab see [^`]+", README)[0]),
    "gpu": (block("With a GPU"),),
    "notebook": ("pip install -e '.[notebooks]'", f"python -c {shlex.quote(NOTEBOOK)}".replace("\n", "$n")),
    "launch": ("pip install -e .", *re.findall("^    (.*attnlab train .*)$", LAUNCH, re.MULTILINE)),
}


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
def test_documented_commands_run_after_the_documented_installation(road, wheels, tmp_path):
    environment = Environment(tmp_path)
    (environment.work / "configs").symlink_to(REPOSITORY / "configs")
    (environment.work / "tiny.py").write_text(TINY)
    for line in filter(None, lines_of(*ROADS[road])):
        if extras := re.search(r"install .*-e ['\"]?\.(\[[\w,]+\])?", line):
            environment.link(f"attnlab{extras[1] or ''}")
            environment.pip("install", "--no-deps", "--no-index", *wheels.glob("attnlab-*"))
        elif line.startswith("curl "):
            (environment.work / line.rsplit("/", 1)[1]).write_text("Once upon a time there was a child. " * 999)
        elif "attnlab" in line or line.startswith("python"):
            (environment.work / "FILE.txt").write_text("A text of one's own. " * 999)
            more = " ".join(flags for name, flags in FEWER.items() if re.search(rf"attnlab[ .]{name}|--{name}", line))
            environment.shell(f"{line.split(' #')[0]} {more}".replace("$n", "\n"))
