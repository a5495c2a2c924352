"""Fault-tolerance campaigns: kills, stops, damaged files, full disks; counts what went wrong.

python -m tests.campaigns.faults --kills=100 --stops=40 --corruptions=200 [--json=faults.json]
python -m tests.campaigns.faults --full_disks=20

Kills and stops: a run of some thousand steps gets SIGKILL, or SIGTERM, at random instants spread over its phases, is
restarted each time, and must end with the bits of an undisturbed run. Corruptions: files of a stopped run are
truncated, flipped, removed, values in them replaced; the command must continue to the right end, or report the fault
in one line and keep every intact checkpoint. Full disks: checkpoints go to file systems without free space or inodes
(needs permission to mount); the command must end with one line and exit code 2 within seconds, and continue when there
is room.
"""

import collections
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import jax

from attnlab import commands, experiments, train
from attnlab._benchmarks.harness import options
from attnlab.config import RunConfig
from attnlab.support.errors import UserError
from attnlab.sweeping.together import write
from attnlab.training.checkpoints import Checkpoints
from tests.campaigns.watched import PHASES, Board
from tests.runs import digests, records

QUICKSTART = experiments.files()["quickstart"]
MODEL = {"batch_size": 8, "model.num_layers": 2, "model.width": 32, "model.context": 32, "model.dropout": 0.1}
MODEL |= {"eval.windows": 64, "sample.length": 64, "log.tensorboard": False, "parallel.mesh.data": 1}
LONG = MODEL | {"eval.every": 20, "checkpoint.every": 8, "log.every": 4, "sample.every": 40}
SHORT = MODEL | {"steps": 160, "eval.every": 20, "checkpoint.every": 16, "checkpoint.keep": 3, "log.every": 4}
PROGRAMS = "programs"  # the compilation cache of a campaign
PATIENCE = 300  # seconds for a run to reach a phase, or to end
PROMPT = 10  # seconds for a run to end once it has been asked to stop, or has reported an error


def define(values, argv) -> None:
    """Define the flags."""
    counts = {
        "kills": "SIGKILLs at random instants of one run",
        "stops": "SIGTERMs at random instants of one run",
        "together": "SIGKILLs of runs that are trained together",
        "corruptions": "damaged workdirs",
        "full_disks": "runs whose checkpoints do not fit on their file system",
        "seed": "of the random draws",
    }
    options.define_integers(values, {name: (0, meaning) for name, meaning in counts.items()})
    options.define_json(values)


def main(values) -> int:
    """Runs the chosen campaigns; 1 when anything went wrong."""
    campaigns = {each.__name__: each for each in (kills, stops, together, corruptions, full_disks)}
    for name in campaigns:
        if values[name].value < 0:
            raise UserError(f"--{name}={values[name].value}: expected 0 or more")
    options.check_new(values, "json")
    chosen = {name: values[name].value for name in campaigns if values[name].value}
    if not chosen:
        raise UserError(f"nothing to do: give --{', --'.join(list(campaigns)[:-1])} or --full_disks; see --help")
    figures = {}
    with tempfile.TemporaryDirectory(prefix="attnlab-faults-") as folder:
        for name, count in chosen.items():
            start = time.perf_counter()
            figures[name] = campaigns[name](count, Path(folder) / name, random.Random(values.seed))
            figures[name]["seconds"] = round(time.perf_counter() - start)
            print(f"{name}: " + "; ".join(f"{key} {_cell(value)}" for key, value in figures[name].items()), flush=True)
    for name, row in figures.items():
        for problem in row["wrong"]:
            print(f"{name}: {problem}", file=sys.stderr)
    options.keep(values.json, figures)
    return int(any(row["wrong"] for row in figures.values()))


def _give_up(*_):
    raise TimeoutError(f"not ended in {PATIENCE} s")


def _cell(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    return str(len(value)) if isinstance(value, list) else str(value)


# ----------------------------------------------------------------------------------------------------- kills and stops


def kills(count: int, folder: Path, draw: random.Random) -> dict:
    """SIGKILLs, spread over the phases. Wrong: an end unlike the undisturbed one, a restart behind a checkpoint."""
    return _disturbed(count, folder, draw, signal.SIGKILL)


def stops(count: int, folder: Path, draw: random.Random) -> dict:
    """SIGTERMs. Also wrong: an exit code other than 143, more than ten seconds to end, a finished step lost."""
    return _disturbed(count, folder, draw, signal.SIGTERM)


def _disturbed(count, folder, draw, number) -> dict:
    wrong, seconds, at, missed = [], [], collections.Counter(), collections.Counter()
    undisturbed, workdir = folder / "undisturbed", folder / "run"
    folder.mkdir(parents=True)
    board = Board(str(folder / "board"))
    fields = LONG | {"steps": max(160, 40 * count)}  # about as far as a start gets until it is disturbed
    _finish(undisturbed, fields)
    while sum(at.values()) < count:
        wanted = min(PHASES, key=lambda phase: (at[phase], draw.random()))
        newest = max(_intact(workdir), default=0)
        if wanted == "compile":  # now the process writes cache entries, which the kill may truncate
            shutil.rmtree(folder / PROGRAMS, ignore_errors=True)
        with _started(workdir, fields, board) as (process, output):
            if not _wait_for(process, board, wanted, draw):
                missed[wanted] += 1
                if process.returncode != 0 or missed[wanted] > 5:
                    wrong.append(f"{wanted} was never reached, the process ended with {process.returncode}")
                    break
                wrong += _differences(workdir, undisturbed)
                shutil.rmtree(workdir)  # start again for the remaining signals
                continue
            finished, phases, start = board.step, board.phases(), time.perf_counter()
            process.send_signal(number)
            process.wait(timeout=PATIENCE)
            out = output.read_text(errors="replace")
        if process.returncode == 0 or not phases:  # the run ended before the signal came
            continue
        at[wanted if wanted in phases else phases[0]] += 1
        resumed = re.search(r"resumed from step (\d+)", out)
        if (resumed or finished) and int(resumed[1] if resumed else 0) != newest:
            wrong.append(f"resumed from step {resumed[1] if resumed else 0}, but {newest} was saved")
        if number == signal.SIGTERM:
            seconds.append(time.perf_counter() - start)
            # Before a run handles signals it has nothing to save, and the signal kills it: a shell reports 143 as well.
            if process.returncode != 128 + number and (finished or process.returncode != -number):
                wrong.append(f"ended with {process.returncode} in {phases}: {out.splitlines()[-1:]}")
            if seconds[-1] > PROMPT:
                wrong.append(f"took {seconds[-1]:.1f} s to end, in {phases}")
            if finished and (saved := max(_intact(workdir), default=0)) < finished:
                wrong.append(f"step {finished} was finished, {saved} is what was saved: {phases}")
    _finish(workdir, fields)
    wrong += _differences(workdir, undisturbed)
    figures = {"signals": sum(at.values()), "phases": {phase: at[phase] for phase in PHASES}, "wrong": wrong}
    return figures | ({"slowest to end (s)": round(max(seconds), 1)} if seconds else {})


def together(count: int, folder: Path, draw: random.Random) -> dict:
    """SIGKILLs of three runs that train one to three at a time, at the start and after random steps.

    Wrong: a run with missing records, a loss that jumps away from that of the run alone, a damaged checkpoint.
    """
    wrong, at, env = [], [], os.environ | {"XLA_FLAGS": "", "JAX_COMPILATION_CACHE_DIR": str(folder / PROGRAMS)}
    fields = {f"seed={seed}": SHORT | {"seed": seed} for seed in (1, 2, 3)}
    for name in fields:
        (folder / "alone").mkdir(parents=True, exist_ok=True)
        _finish(folder / "alone" / name, fields[name])
    while len(at) < count:
        workdir = folder / f"together-{len(at)}"
        workdir.mkdir()
        runs, code = workdir / "runs.json", None
        write({name: RunConfig().changed(each) for name, each in fields.items()}, runs)
        while code != 0:
            words = [draw.choice(("3", "3", "2", "1")), str(workdir), str(runs)]
            command = [sys.executable, "-m", "attnlab.sweeping.together", *words]
            before = sum(map(_reached, map(workdir.joinpath, fields)))
            kills, starting = len(at) < count and before < 3 * SHORT["steps"], draw.random() < 0.2
            wanted = draw.randrange(before, 3 * SHORT["steps"]) if kills and not starting else before
            with (workdir / "out").open("a") as out:
                process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
            if kills and starting:
                time.sleep(draw.uniform(0, 8))
            while kills and process.poll() is None and sum(map(_reached, map(workdir.joinpath, fields))) < wanted:
                time.sleep(0.002)
            if kills and process.poll() is None:
                process.kill()
                at.append(sum(map(_reached, map(workdir.joinpath, fields))))
            code = process.wait(timeout=PATIENCE)
            if code not in (0, -signal.SIGKILL):
                wrong.append(f"ended with {code}: {(workdir / 'out').read_text()[-300:]}")
                break
        wrong += [fault for name in fields for fault in _unlike(workdir / name, folder / "alone" / name)]
    return {"kills": len(at), "steps of all": str(sorted(at)), "wrong": wrong}


def _reached(workdir: Path) -> int:
    """The last step that is recorded."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def _unlike(workdir: Path, alone: Path) -> list[str]:
    """Differences between two finished runs, except differences that start as rounding and grow with training."""
    mine, theirs = records(workdir), records(alone)
    if [(r["split"], r["step"]) for r in mine] != [(r["split"], r["step"]) for r in theirs]:
        return [f"{workdir.name}: other records"]
    apart = next(filter(None, (abs(a["loss"] - b["loss"]) for a, b in zip(mine, theirs))), 0)
    damaged = _intact(workdir) != _intact(alone)
    return [f"{workdir.name}: a loss jumps by {apart}"] * (apart > 1e-4) + [f"{workdir.name}: checkpoints"] * damaged


def _arguments(workdir: Path, fields: dict) -> list[str]:
    options = (f"--config.{name}={value}" for name, value in fields.items())
    return [f"--config={QUICKSTART}", *options, f"--workdir={workdir}"]


@contextlib.contextmanager
def _started(workdir: Path, fields: dict, board: Board | None = None):
    """The command in a subprocess, which ends with this block, and the file with its output."""
    module = ["tests.campaigns.watched", board.path] if board else ["attnlab.train"]
    if board:
        board.clear()
    output, programs = workdir.with_name(f"{workdir.name}.out"), str(workdir.with_name(PROGRAMS))
    command = [sys.executable, "-m", *module, *_arguments(workdir, fields)]
    env = os.environ | {"XLA_FLAGS": "", "PYTHONUNBUFFERED": "1", "JAX_COMPILATION_CACHE_DIR": programs}
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
    try:
        yield process, output
    finally:
        process.kill()
        process.wait()


def _finish(workdir: Path, fields: dict) -> None:
    with _started(workdir, fields) as (process, output):
        process.wait(timeout=PATIENCE)
    if process.returncode:
        said = output.read_text(errors="replace")[-300:]
        raise UserError(f"a run without faults ended with {process.returncode}: {said}")


def _wait_for(process, board, wanted, draw) -> bool:
    """Waits for a random instant of a phase; returns False if the process ends first."""
    times = draw.randint(1, 3) if wanted in PHASES[2:] else 1
    deadline = time.monotonic() + PATIENCE
    while times and time.monotonic() < deadline:
        while wanted not in board.phases():
            time.sleep(0.001)
            if process.poll() is not None or time.monotonic() > deadline:
                return False
        times -= 1
        if times:
            while wanted in board.phases() and process.poll() is None:
                time.sleep(0.001)
    longest = {"start": 2.0, "compile": 1.0, "step": 0.1}.get(wanted, 0.01)
    time.sleep(draw.uniform(0, longest))
    return process.poll() is None


def _intact(workdir: Path) -> list[int]:
    checkpoints = Checkpoints(workdir / "checkpoints")
    return [step for step in checkpoints.steps() if not checkpoints.damage(step)]


def _differences(workdir: Path, undisturbed: Path) -> list[str]:
    """Differences between two finished runs: records except times, checkpoints, and every bit of the last one."""
    mine, theirs = (records(folder) for folder in (workdir, undisturbed))
    differences = []
    if mine != theirs:
        first = next((pair for pair in zip(mine, theirs) if pair[0] != pair[1]), (len(mine), len(theirs)))
        differences.append(f"metrics.jsonl differs: {first[0]}, undisturbed {first[1]}")
    steps = [_intact(folder) for folder in (workdir, undisturbed)]
    if steps[0] != steps[1]:
        differences.append(f"checkpoints {steps[0]}, undisturbed {steps[1]}")
    elif digests(workdir, steps[0][-1]) != digests(undisturbed, steps[1][-1]):
        differences.append("the parameters or the optimizer's state differ")
    return differences


# --------------------------------------------------------------------------------------------------------- corruptions


def corruptions(count: int, folder: Path, draw: random.Random) -> dict:
    """Damaged workdirs. Wrong: a traceback, an end unlike the undisturbed one, the loss of an intact checkpoint."""
    undisturbed, stopped = folder / "undisturbed", folder / "stopped"
    folder.mkdir(parents=True)
    jax.config.update("jax_compilation_cache_dir", str(folder / PROGRAMS))  # the same program hundreds of times
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    _command(train, _arguments(undisturbed, SHORT))
    board = Board(str(folder / "board"))
    with _started(stopped, SHORT, board) as (process, _):
        while board.step < SHORT["steps"] // 2 and process.poll() is None:
            time.sleep(0.001)
        process.terminate()
        process.wait(timeout=PATIENCE)
    wrong, outcomes = [], collections.Counter()
    for number in range(count):
        workdir = folder / f"run-{number}"
        shutil.copytree(stopped, workdir)
        what = " and ".join(_corrupt(workdir, draw) for _ in range(draw.choice((1, 1, 1, 2))))
        intact = _intact(workdir)
        code, out, error = _command(train, _arguments(workdir, SHORT))
        label = f"{what} → {code} {error.strip()[-200:]}"
        if "Traceback" in error or code not in (0, 2) or (code == 2 and len(error.strip().splitlines()) != 1):
            wrong.append(f"{label}: not one line")
        elif code == 2:
            outcomes["rejected"] += 1
            if set(intact) - set(_intact(workdir)):
                wrong.append(f"{label}: checkpoints {intact} were intact, {_intact(workdir)} are")
        else:
            outcomes["resumed"] += 1
            resumed = re.search(r"resumed from step (\d+)", out)
            if int(resumed[1] if resumed else 0) != max(intact, default=0):
                wrong.append(f"{label}: resumed from step {resumed[1] if resumed else 0}, where {intact} were intact")
            lost = "are lost" in out or "starting from the beginning" in out
            if records(workdir)[-1] != records(undisturbed)[-1]:
                wrong.append(f"{label}: another end")
            elif records(workdir) != records(undisturbed) and not lost:
                wrong.append(f"{label}: other records")
        shutil.rmtree(workdir, ignore_errors=True)
    return {"workdirs": count, "outcomes": dict(outcomes), "wrong": wrong}


def _corrupt(workdir: Path, draw: random.Random) -> str:
    """Damages one file or folder; returns what was done."""
    files = sorted(path for path in workdir.rglob("*") if path.is_file())
    folders = sorted(path for path in workdir.glob("checkpoints/*") if path.is_dir())
    if folders and draw.random() < 1 / 7:
        path = draw.choice(folders)
        match how := draw.choice(("removed", "emptied", "renamed", "copied", "uncommitted")):
            case "removed":
                shutil.rmtree(path)
            case "emptied":
                shutil.rmtree(path)
                path.mkdir()
            case "renamed":
                path.rename(path.with_name(str(draw.randint(100, 999))))
            case "copied":
                shutil.copytree(path, path.with_name(str(draw.randint(100, 999))))
            case "uncommitted":
                shutil.copytree(path, path.with_name(f"{draw.randint(100, 999)}.orbax-checkpoint-tmp"))
        return f"{path.relative_to(workdir)} {how}"
    # A checkpoint has many files; the run's own three must be chosen often enough.
    path = draw.choice([path for path in files if path.parent == workdir] if draw.random() < 0.3 else files)
    return f"{path.relative_to(workdir)} {_damage(path, draw)}"


def _damage(path: Path, draw: random.Random) -> str:
    """Damages one file; returns how."""
    content = bytearray(path.read_bytes())
    kinds = ["truncated", "flipped", "flipped", "removed", "overwritten", "lengthened"]
    kind = draw.choice(kinds + ["another value"] * 4 * (path.suffix == ".json"))
    match kind:
        case "another value":
            with contextlib.suppress(ValueError, RecursionError):  # damaged before
                value, kind = _with_another_value(json.loads(content), draw)
                content = json.dumps(value).replace('"DEEP"', "[" * 1000 + "]" * 1000).encode()
        case "truncated":
            content = content[: draw.randrange(len(content) + 1)]
        case "flipped" if content:
            for _ in range(draw.choice((1, 1, 3))):
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        case "overwritten" if content:
            first = draw.randrange(len(content))
            content[first : first + 64] = bytes(len(content[first : first + 64]))
        case "lengthened":
            content += draw.randbytes(draw.randint(1, 99))
    path.unlink()
    if kind != "removed":
        path.write_bytes(content)
    return kind


def _with_another_value(value, draw: random.Random, name: str = "") -> tuple[object, str]:
    """The JSON value with one value replaced at any depth, and a description of the change."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        inner, done = _with_another_value(value[key], draw, f"{name}.{key}")
        return value | {key: inner}, done
    other = draw.choice(
        [None, True, -1, 0, 3, 2**40, 1e300, float("nan"), "", "x", "\0", [], [1], {}, {"a": []}, "DEEP"]
    )
    return other, f"{name or 'all of it'} = {other!r}"


def _command(module, argv: list[str], **hooks) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command run in this process; raises if it takes minutes."""
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(PATIENCE)
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = module.main(["attnlab", *argv], **hooks)
        except BaseException:  # a command that raises is a finding
            traceback.print_exc()
            code = 1
    signal.alarm(0)
    return code, out.getvalue(), error.getvalue()


# ------------------------------------------------------------------------------------------ full disks


def full_disks(count: int, folder: Path, draw: random.Random) -> dict:
    """Checkpoints on small file systems. Wrong: anything but one line and exit code 2 at once, a damaged checkpoint.

    Every second file system runs out of inodes, the others of space. With more room, the run must finish correctly.
    """
    folder.mkdir(parents=True)
    wrong, seconds = [], []
    undisturbed = folder / "undisturbed"
    _finish(undisturbed, SHORT)
    one = max((undisturbed / "checkpoints").glob("[0-9]*"))
    inodes = sum(1 for _ in one.rglob("*"))
    size = sum(-(-path.stat().st_size // 4096) * 4 for path in one.rglob("*") if path.is_file())  # KiB, whole pages
    for number in range(count):
        share = draw.uniform(0.0, SHORT["checkpoint.keep"] + 0.5)  # a run needs room for keep + 1 checkpoints
        options = f"nr_inodes={4 + round(share * inodes)}" if number % 2 else f"size={8 + round(share * size)}k"
        workdir, disk = folder / f"run-{number}", folder / f"disk-{number}"
        fields = SHORT | {"checkpoint.dir": disk / "kept"}
        with _small_file_system(disk, options):
            with _started(workdir, fields) as (process, output):
                code, took = _end_after_error(process, output)
            error = [line for line in output.read_text(errors="replace").splitlines() if "error: " in line]
            label = f"{options} → {code} {error[-1:]}"
            seconds.append(took)
            if code != 2 or len(error) != 1 or "Traceback" in output.read_text(errors="replace"):
                wrong.append(f"{label}: not one line")
            if took > PROMPT:
                wrong.append(f"{label}: took {took:.0f} s to end")
            checkpoints = Checkpoints(disk / "kept")
            if any(checkpoints.damage(step) for step in checkpoints.steps()):
                wrong.append(f"{label}: a damaged checkpoint")
            subprocess.run(["mount", "-o", "remount,size=1g,nr_inodes=1000000", disk], check=True)
            _finish(workdir, fields)
            if records(workdir) != records(undisturbed):
                wrong.append(f"{label}: another end")
    return {"runs": count, "slowest to end (s)": round(max(seconds), 1), "wrong": wrong}


def _end_after_error(process, output: Path) -> tuple[int | None, float]:
    """Waits for a process; returns its exit code (None if it had to be killed) and the seconds after its error line."""
    deadline, reported = time.monotonic() + PATIENCE, None
    while process.poll() is None and time.monotonic() < deadline:
        if reported is None and "error: " in output.read_text(errors="replace"):
            reported = time.monotonic()
            deadline = reported + 3 * PROMPT
        time.sleep(0.05)
    return process.poll(), time.monotonic() - reported if reported else 0.0


@contextlib.contextmanager
def _small_file_system(folder: Path, options: str):
    """A file system in memory, mounted at a new folder inside the block."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"a file system cannot be mounted ({done.stderr.strip()}): leave out --full_disks, or be root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


if __name__ == "__main__":
    sys.exit(commands.run(define, main, __doc__))
