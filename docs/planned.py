"""Write the tables of docs/guide/hardware.md from plans compiled on this machine.

python docs/planned.py                         # all of them: the better part of an hour on two CPU cores
python docs/planned.py quickstart sancho:tiny  # these configs
python docs/planned.py memory meshes           # GPT-2 124M: what remat saves, and how eight H100s may share it

Nothing runs on the target hardware. Only its compilers run, on this machine: libtpu and JAX's CUDA plugin, with Python
3.12 or newer (`make planned PYTHON=python3.12 VENV=.venv-hardware` installs them). Plans stay in build/planned until
the source or a compiler changes, so that an interrupted call resumes; the tables show all plans in that folder.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from attnlab import experiments

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "docs" / "guide" / "planned.txt"
COMPILERS = {"jax": "JAX", "libtpu": "libtpu", "jax-cuda13-plugin": "the CUDA 13 plugin", "nvidia-cudnn-cu13": "cuDNN"}

TOPOLOGIES = {"v5e:2x2": 4, "v5p:2x2x1": 4, "h100:8": 8}  # and their devices
# Options that a config needs if its text and the weights of GPT-2 are not here.
CONFIGS = {
    "quickstart": (),
    "sancho:tiny": (),
    "sancho:small": (),
    "sancho": (),
    "shakespeare_char": ("--vocab_size=65",),
    "gpt_30m": (),
    "gpt2_124m": (),
    "gpt2_finetune": (
        "--config.data.tokenizer=byte",
        "--vocab_size=50257",
        *(f"--config.model.{size}" for size in ("num_layers=12", "num_heads=12", "width=768")),
        *(f"--config.model.{option}" for option in ("positions=learned", "attention.qk_norm=False", "use_bias=True")),
    ),
}
REMAT = ("none", "dots", "attention", "block")
BATCHES = {"v5e": 8, "h100": 32}  # for the table of remat, by topology
MESHES = ({"data": 8}, {"data": 1, "fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2})


class Case(NamedTuple):
    """A row: its table, its first cells, and the options of its plan."""

    table: str
    cells: tuple[str, ...]
    options: tuple[str, ...]

    @property
    def file(self) -> str:
        """A name for its plan."""
        return hashlib.sha256(" ".join(self.options).encode()).hexdigest()[:16] + ".json"


def main(names: list[str]) -> int:
    """Compiles the named configs and tables, or all without names, and writes the tables."""
    known = [*CONFIGS, "memory", "meshes"]
    if unknown := [name for name in names if name not in known]:
        print(f"error: {unknown[0]!r} is not a config or table: use {', '.join(known)}", file=sys.stderr)
        return 2
    rows = cases()
    folder = ROOT / "build" / "planned" / digest()
    folder.mkdir(parents=True, exist_ok=True)
    for case in rows:
        if not names or {case.table, case.cells[0]} & set(names):
            compile_for(case, folder / case.file)
    plans = {case: json.loads((folder / case.file).read_text()) for case in rows if (folder / case.file).exists()}
    TABLES.write_text(text(rows, plans), encoding="utf-8")
    missing = f", {len(rows) - len(plans)} are missing" if len(plans) < len(rows) else ""
    print(f"{TABLES.relative_to(ROOT)}: {len(plans)} plans{missing}")
    return 0


def cases() -> list[Case]:
    """All rows, in their order."""
    rows = []
    for config, needed in CONFIGS.items():
        for topology, devices in TOPOLOGIES.items():
            used = math.gcd(microbatch(config), devices)
            fewer = (f"--config.parallel.mesh.data={used}",) if used < devices else ()
            options = (f"--config={config}", f"--topology={topology}", *needed, *fewer)
            rows.append(Case("configs", (config, topology, str(used)), options))
    gpt2 = ("--config=gpt2_124m", "--config.optimizer.accumulation=1")
    for topology, batch in BATCHES.items():
        for remat in REMAT:
            options = (f"--config.batch_size={batch}", f"--config.model.remat={remat}", f"--topology={topology}")
            rows.append(Case("memory", (topology, str(batch), remat), (*gpt2, *options)))
    for mesh in MESHES:
        options = (f"--config.parallel.mesh.{axis}={size}" for axis, size in mesh.items())
        label = " × ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
        rows.append(Case("meshes", (label,), (*gpt2, "--config.batch_size=32", *options, "--topology=h100:8")))
    return rows


def microbatch(config: str) -> int:
    """Sequences that a config's devices share at a time."""
    run_config = experiments.load(config)
    return run_config.batch_size // run_config.optimizer.accumulation


def compile_for(case: Case, file: Path) -> None:
    """Compiles the plan of a row in a subprocess, unless the plan exists."""
    if file.exists():
        return
    start, new = time.perf_counter(), file.with_suffix(".new")
    new.unlink(missing_ok=True)
    command = [sys.executable, "-m", "attnlab.plan", *case.options, f"--json={new}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):  # 1: it does not fit
        raise SystemExit(f"{' '.join(case.options)}: {done.stderr.strip() or done.returncode}")
    new.replace(file)
    print(f"{case.table}, {', '.join(case.cells)}: {time.perf_counter() - start:.0f} s", flush=True)


def digest() -> str:
    """A hash of everything that a plan depends on."""
    sha256 = hashlib.sha256(versions().encode())
    for file in sorted([*(ROOT / "attnlab").rglob("*.py"), *(ROOT / "configs").glob("*.py")]):
        sha256.update(file.read_bytes())
    return sha256.hexdigest()[:16]


def versions() -> str:
    """The versions of the compilers."""
    try:
        return ", ".join(f"{name} {importlib.metadata.version(package)}" for package, name in COMPILERS.items())
    except importlib.metadata.PackageNotFoundError as missing:
        raise SystemExit(f"error: {missing.name} is not there: pip install -e '.[hardware]', Python 3.12") from missing


def text(cases: list[Case], plans: dict[Case, dict]) -> str:
    """The file that the page includes, with a section for each table.

    Args:
      cases: all rows.
      plans: the plans compiled so far.
    """
    memory = ("arguments", "temporaries", "peak")
    sizes = [(name, lambda plan, key=f"{name}_gib": size(plan["training"][key])) for name in memory]
    sizes.append(("of", lambda plan: size(plan["device_gib"])))
    fits = ("fits", lambda plan: {True: "yes", False: "no", None: "unknown"}[plan["fits"]])
    attention = ("attention", lambda plan: ", ".join(dict.fromkeys(plan["attention"].values())))
    moved = ("collectives of a step", collectives)
    seconds = ("compiled in", lambda plan: f"{plan['training']['compile_seconds']:.0f} s")
    columns = {
        "configs": (("config", "topology", "devices"), (fits, *sizes, attention, moved, seconds)),
        "memory": (("topology", "batch", "remat"), (fits, *sizes, seconds)),
        "meshes": (("mesh",), (fits, *sizes, moved, seconds)),
    }
    sections = {"versions": f"Compiled with {versions()}, on {os.cpu_count()} {platform.machine()} cores."}
    for name, (first, rest) in columns.items():
        header = [*first, *(label for label, _ in rest)]
        rows = [
            [*(f"`{case.cells[0]}`", *case.cells[1:]), *(cell(plan) for _, cell in rest)]
            for case, plan in plans.items()
            if case.table == name
        ]
        missing = sum(case.table == name for case in cases) - len(rows)
        absent = [f"Not compiled yet: {missing} row{'s' * (missing > 1)} (`make planned`)."] if missing else []
        sections[name] = "\n\n".join([*([table(header, rows)] if rows else []), *absent])
    return "\n".join(f"--8<-- [start:{name}]\n{body}\n--8<-- [end:{name}]" for name, body in sections.items()) + "\n"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Rows of cells as Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def size(gib: float | None) -> str:
    """GiB with two digits."""
    return "–" if gib is None else "< 0.01" if 0 < gib < 0.005 else f"{gib:.2f}"


def collectives(plan: dict) -> str:
    """Number and GiB of each kind of collective."""
    if plan["training"]["temporaries_gib"] is None:  # refused
        return "–"
    counts = plan["collectives"].items()
    return ", ".join(f"{count} {kind} ({size(moved / 2**30)} GiB)" for kind, (count, moved) in counts) or "none"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
