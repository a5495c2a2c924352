"""Does a run endure? Kills it, stops it, damages what it wrote, mistypes its command; counts what went wrong.

python -m attnlab.bench faults --kills=100 --stops=40 --corruptions=200 --commands=1000 [--json=faults.json]

Kills and stops: a run of some thousand steps gets SIGKILL, or SIGTERM, at random instants spread over its phases, is
started again each time, and must end with the bits of the undisturbed one. Corruptions: files of a stopped run are
truncated, flipped, removed; the command must go on to the right end, or say in one line what is wrong and leave every
whole checkpoint where it is. Commands: each malformed line must end in one line and exit code 2, with nothing written.
"""

import collections
import contextlib
import io
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
from absl import flags

from attnlab import config as configs
from attnlab import train
from attnlab.bench import options
from attnlab.bench.watched import PHASES, Board
from attnlab.errors import UserError
from attnlab.training import metrics
from attnlab.training.checkpoints import Checkpoints

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.py"
MODEL = {
    "batch_size": 8,
    "model.num_layers": 2,
    "model.width": 32,
    "model.context": 32,
    "model.dropout": 0.1,
    "eval.windows": 64,
    "sample.length": 64,
    "log.tensorboard": False,
    "parallel.mesh.data": 1,
}
LONG = MODEL | {"eval.every": 20, "checkpoint.every": 8, "log.every": 4, "sample.every": 40}
SHORT = MODEL | {"steps": 160, "eval.every": 20, "checkpoint.every": 16, "checkpoint.keep": 3, "log.every": 4}
TIMING = re.compile("time|second|mfu|flops|wall|eta|rss|memory")  # keys that may differ between two runs of a seed
PROGRAMS = "programs"  # the compilation cache of a campaign
PATIENCE = 300  # seconds for a run to come to a phase, or to end


def define(values, argv) -> None:
    """The flags."""
    flags.DEFINE_integer("kills", 0, "SIGKILLs at random instants of one run", flag_values=values)
    flags.DEFINE_integer("stops", 0, "SIGTERMs at random instants of one run", flag_values=values)
    flags.DEFINE_integer("corruptions", 0, "damaged workdirs", flag_values=values)
    flags.DEFINE_integer("commands", 0, "malformed command lines, a fifth of them as processes", flag_values=values)
    flags.DEFINE_integer("seed", 0, "of what is drawn", flag_values=values)
    options.define_json(values)


def main(values) -> int:
    """Runs the campaigns that are asked for; 1 when anything went wrong."""
    campaigns = {"kills": kills, "stops": stops, "corruptions": corruptions, "commands": malformed}
    for name in campaigns:
        if values[name].value < 0:
            raise UserError(f"--{name}={values[name].value}: expected 0 or more")
    options.check_new(values, "json")
    chosen = {name: values[name].value for name in campaigns if values[name].value}
    if not chosen:
        raise UserError("nothing to do: give --kills, --stops, --corruptions or --commands; see --help")
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


def _cell(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    return str(len(value)) if isinstance(value, list) else str(value)


# ----------------------------------------------------------------------------------------------------- kills and stops


def kills(count: int, folder: Path, draw: random.Random) -> dict:
    """SIGKILLs, spread over the phases. Wrong: an end other than the undisturbed one, a start behind a checkpoint."""
    return _disturbed(count, folder, draw, signal.SIGKILL)


def stops(count: int, folder: Path, draw: random.Random) -> dict:
    """SIGTERMs. Wrong also: another exit code than 143, more than ten seconds to leave, a finished step lost."""
    return _disturbed(count, folder, draw, signal.SIGTERM)


def _disturbed(count, folder, draw, number) -> dict:
    wrong, seconds, at, missed = [], [], collections.Counter(), collections.Counter()
    undisturbed, workdir = folder / "undisturbed", folder / "run"
    folder.mkdir(parents=True)
    board = Board(str(folder / "board"))
    fields = LONG | {"steps": max(400, 40 * count)}  # about as far as a start comes until it is disturbed
    _finish(undisturbed, fields)
    while sum(at.values()) < count:
        wanted = min(PHASES, key=lambda phase: (at[phase], draw.random()))
        newest = max(_whole(workdir), default=0)
        if wanted == "compile":  # and write what was compiled, where the kill may tear it
            shutil.rmtree(folder / PROGRAMS, ignore_errors=True)
        with _started(workdir, fields, board) as (process, output):
            if not _wait_for(process, board, wanted, draw):
                missed[wanted] += 1
                if process.returncode != 0 or missed[wanted] > 5:
                    wrong.append(f"{wanted} never came, the process ended with {process.returncode}")
                    break
                wrong += _differences(workdir, undisturbed)
                shutil.rmtree(workdir)  # and from the beginning, for what is still to be done
                continue
            finished, phases, start = board.step, board.phases(), time.perf_counter()
            process.send_signal(number)
            process.wait(timeout=PATIENCE)
            out = output.read_text(errors="replace")
        if process.returncode == 0 or not phases:  # it was over before the signal came
            continue
        at[wanted if wanted in phases else phases[0]] += 1
        resumed = re.search(r"resumed from step (\d+)", out)
        if (resumed or finished) and int(resumed[1] if resumed else 0) != newest:
            wrong.append(f"went on from step {resumed[1] if resumed else 0}, where {newest} was there")
        if number == signal.SIGTERM:
            seconds.append(time.perf_counter() - start)
            # Before a run can handle signals it has nothing to save, and dies of them: 143 as well, to a shell.
            if process.returncode != 128 + number and (finished or process.returncode != -number):
                wrong.append(f"ended with {process.returncode} in {phases}: {out.splitlines()[-1:]}")
            if seconds[-1] > 10:
                wrong.append(f"took {seconds[-1]:.1f} s to leave, in {phases}")
            if finished and max(_whole(workdir), default=0) < finished:
                wrong.append(
                    f"step {finished} was finished, {max(_whole(workdir), default=0)} is what was saved: {phases}"
                )
    _finish(workdir, fields)
    wrong += _differences(workdir, undisturbed)
    figures = {"signals": sum(at.values()), "phases": {phase: at[phase] for phase in PHASES}, "wrong": wrong}
    return figures | ({"slowest to leave (s)": round(max(seconds), 1)} if seconds else {})


def _arguments(workdir: Path, fields: dict) -> list[str]:
    return [
        f"--config={QUICKSTART}",
        *(f"--config.{name}={value}" for name, value in fields.items()),
        f"--workdir={workdir}",
    ]


@contextlib.contextmanager
def _started(workdir: Path, fields: dict, board: Board | None = None):
    """The command in a process of its own, that does not survive this block, and the file that its output goes to."""
    module = ["attnlab.bench.watched", board.path] if board else ["attnlab.train"]
    if board:
        board.clear()
    output = workdir.with_name(f"{workdir.name}.out")
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *module, *_arguments(workdir, fields)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {"XLA_FLAGS": "", "PYTHONUNBUFFERED": "1", "JAX_COMPILATION_CACHE_DIR": str(workdir.with_name(PROGRAMS))},
        )
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
        raise UserError(f"the run that nobody disturbs ended with {process.returncode}: {said}")


def _wait_for(process, board, wanted, draw) -> bool:
    """Whether a random instant of a phase has come; False when the process ended before."""
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


def _whole(workdir: Path) -> list[int]:
    checkpoints = Checkpoints(workdir / "checkpoints")
    return [step for step in checkpoints.steps() if not checkpoints.damage(step)]


def _differences(workdir: Path, undisturbed: Path) -> list[str]:
    """What is not the same in two finished runs: records but for times, checkpoints, and every bit of the last."""
    mine, theirs = (_records(folder) for folder in (workdir, undisturbed))
    found = []
    if mine != theirs:
        first = next((pair for pair in zip(mine, theirs) if pair[0] != pair[1]), (len(mine), len(theirs)))
        found.append(f"metrics.jsonl differs: {first[0]}, undisturbed {first[1]}")
    kept = [_whole(folder) for folder in (workdir, undisturbed)]
    if kept[0] != kept[1]:
        found.append(f"checkpoints {kept[0]}, undisturbed {kept[1]}")
    elif _bits(workdir, kept[0][-1]) != _bits(undisturbed, kept[1][-1]):
        found.append("the parameters or the optimizer's state differ")
    return found


def _records(workdir: Path) -> list[dict]:
    """What may not differ between two runs of a seed."""
    kept = metrics.read(workdir / "metrics.jsonl")
    return [{key: value for key, value in record.items() if not TIMING.search(key)} for record in kept]


def _bits(workdir: Path, step: int) -> dict:
    return Checkpoints(workdir / "checkpoints").digests(step)


# --------------------------------------------------------------------------------------------------------- corruptions


def corruptions(count: int, folder: Path, draw: random.Random) -> dict:
    """Damaged workdirs. Wrong: a traceback, another end than the undisturbed one, a whole checkpoint that is gone."""
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
        whole = _whole(workdir)
        code, out, error = _command(train, _arguments(workdir, SHORT))
        label = f"{what} → {code} {error.strip()[-200:]}"
        if "Traceback" in error or code not in (0, 2) or (code == 2 and len(error.strip().splitlines()) != 1):
            wrong.append(f"{label}: not one line")
        elif code == 2:
            outcomes["refused"] += 1
            if set(whole) - set(_whole(workdir)):
                wrong.append(f"{label}: checkpoints {whole} were whole, {_whole(workdir)} are")
        else:
            outcomes["went on"] += 1
            resumed = re.search(r"resumed from step (\d+)", out)
            if int(resumed[1] if resumed else 0) != max(whole, default=0):
                wrong.append(f"{label}: went on from step {resumed[1] if resumed else 0}, where {whole} were whole")
            lost = "are lost" in out or "starting from the beginning" in out
            if _records(workdir)[-1] != _records(undisturbed)[-1]:
                wrong.append(f"{label}: another end")
            elif _records(workdir) != _records(undisturbed) and not lost:
                wrong.append(f"{label}: other records")
        shutil.rmtree(workdir, ignore_errors=True)
    return {"workdirs": count, "outcomes": dict(outcomes), "wrong": wrong}


def _corrupt(workdir: Path, draw: random.Random) -> str:
    """Damages one thing; says what."""
    files = sorted(path for path in workdir.rglob("*") if path.is_file())
    folders = sorted(path for path in (workdir / "checkpoints").iterdir() if path.is_dir())
    kind = draw.choice(("truncated", "flipped", "flipped", "removed", "overwritten", "lengthened", "folder"))
    if kind == "folder" and folders:
        path, how = (
            draw.choice(folders),
            draw.choice(("removed", "emptied", "renamed", "copied", "a file", "uncommitted")),
        )
        match how:
            case "removed":
                shutil.rmtree(path)
            case "emptied":
                shutil.rmtree(path)
                path.mkdir()
            case "renamed":
                path.rename(path.with_name(str(draw.randint(100, 999))))
            case "copied":
                shutil.copytree(path, path.with_name(str(draw.randint(100, 999))))
            case "a file":
                shutil.rmtree(path)
                path.write_bytes(b"")
            case "uncommitted":
                shutil.copytree(path, path.with_name(f"{draw.randint(100, 999)}.orbax-checkpoint-tmp"))
        return f"{path.relative_to(workdir)} {how}"
    # A checkpoint has many files, the run's own three must not be forgotten among them.
    path = draw.choice([path for path in files if path.parent == workdir] if draw.random() < 0.3 else files)
    content = bytearray(path.read_bytes())
    match kind:
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
    if kind == "removed":
        path.unlink()
    else:
        path.write_bytes(content)
    return f"{path.relative_to(workdir)} {kind}"


def _command(module, argv: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, in this process."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = module.main(["attnlab", *argv])
        except BaseException:  # a command that raises is what is looked for
            traceback.print_exc()
            code = 1
    return code, out.getvalue(), error.getvalue()


# ------------------------------------------------------------------------------------------------------------ commands


def malformed(count: int, folder: Path, draw: random.Random) -> dict:
    """Malformed command lines. Wrong: anything but one line, exit code 2 and a folder as empty as before."""
    wrong, kinds = [], set()
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        for number in range(count):
            kind, argv = _malformed(draw)
            kinds.add(kind)
            if number % 5 == 0:
                done = subprocess.run(
                    [sys.executable, "-m", "attnlab.train", *argv], capture_output=True, text=True, errors="replace"
                )
                code, error = done.returncode, done.stderr
            else:
                code, _, error = _command(train, argv)
            lines = error.strip().splitlines()
            if code != 2 or len(lines) != 1 or not lines[0].startswith("error: ") or "Traceback" in error:
                wrong.append(f"{argv} → {code} {error.strip()[-300:]!r}")
            if any(folder.iterdir()):
                wrong.append(f"{argv} wrote {[path.name for path in folder.iterdir()]}")
                shutil.rmtree(folder)
                folder.mkdir()
                os.chdir(folder)
    return {"lines": count, "kinds": len(kinds), "wrong": wrong}


def _malformed(draw: random.Random) -> tuple[str, list[str]]:
    """A command line that no run can come of, and what is wrong with it."""
    defaults = configs.fields(configs.default())
    # Fields whose wrong values are known without looking: not those that are text, or that may be anything.
    whole = [name for name, value in defaults.items() if type(value) is int and name != "parallel.mesh.data"]
    real = [name for name, value in defaults.items() if type(value) is float]
    flag = [name for name, value in defaults.items() if type(value) is bool]
    choices = ["precision", "on_nonfinite", "data.tokenizer", "data.name", "parallel.strategy", "model.positions"]
    config = f"--config={QUICKSTART}"
    noise = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz-_.,:;/ñ☃ ", k=draw.randint(1, 12))).strip() or "x"

    def bad(field, values):
        return [config, f"--config.{field}={draw.choice(values)}"]

    kinds = {
        "no whole number": lambda: bad(draw.choice(whole), ["x", "1.5", "", "-3", "1e3", "None", "9" * 20, noise]),
        "no number": lambda: bad(draw.choice(real), ["x", "", "nan", "-1", "inf", "None", "1,5", noise]),
        "neither true nor false": lambda: bad(draw.choice(flag), ["2", "maybe", "", noise]),
        "no such choice": lambda: bad(draw.choice(choices), ["x", "", "None", "mesh ", noise]),
        "no such field": lambda: [config, f"--config.{_misspelt(draw.choice(list(defaults)), draw)}=1"],
        "no such flag": lambda: [config, f"--{_misspelt(draw.choice(['workdir', 'eval_only']), draw)}=1"],
        "no config": lambda: draw.choice(([], ["--workdir=w"], ["--config"], ["--config="])),
        "no such file": lambda: [f"--config={noise}.py"],
        "no such variant": lambda: [f"{config}:{noise}"],
        "a word too many": lambda: [config, noise if not noise.startswith("-") else "x"],
        "heads that do not divide": lambda: bad("model.num_heads", ["3", "5", "7", "1000"]),
        "a text that is not there": lambda: bad("data.path", ["nowhere.txt", "no/where/*.txt", noise + "/x"]),
        "a batch that does not divide": lambda: [*bad("optimizer.accumulation", ["5", "7"]), "--config.batch_size=12"],
        "a workdir that is a file": lambda: [config, f"--workdir={QUICKSTART}"],
        "nothing to evaluate": lambda: [config, "--eval_only", f"--workdir={draw.choice(['none', 'a/b'])}"],
    }
    kind = draw.choice(list(kinds))
    return kind, kinds[kind]()


def _misspelt(name: str, draw: random.Random) -> str:
    at = draw.randrange(len(name))
    return draw.choice((name[:at] + "zq" + name[at:], name[: at + 1] + "zq", "zq" + name))
