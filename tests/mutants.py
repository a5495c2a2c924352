"""Mutation testing: a seeded list of small faults in attnlab, and whether the fast tests notice each of them.

    python tests/mutants.py [--folders ops nn …] [--count 60] [--seed 0] [--out build/mutants.csv]

In a copy of the tree, every mutated expression is first marked, and the fast tests run once, which shows the
tests that reach it. Then each mutant runs these tests, the fastest first, until one fails. It survives if none fails
within a minute of processor time. Mutants that no test has to notice are named in `EXCLUDED`, each with
its reason.
"""

import argparse
import ast
import collections
import concurrent.futures
import csv
import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ops", "nn", "training", "data", "generation")
SECONDS = 60
FAST = ["-m", "not slow and not campaign and not hardware"]

# (file, a part of the line, the change or "" for any change): the reason why no test has to notice it.
EXCLUDED = {
    ("data/subwords.py", "vocab_size = min(vocab_size, 256 +", "3 -> 4"): "a bound of memory; a larger one is as right",
    ("generation/decoding.py", "return 1 << max(0, least - 1).bit_length()", ""): "one column of padding more",
    ("generation/decoding.py", 'if jax.default_backend() == "cpu" and', " or "): "on CPUs float32 stays what it is",
    ("generation/decoding.py", "if time.perf_counter() - begin < 0.05:", "<= 0.05"): "no time is exactly this one",
    ("generation/drawing.py", "if self.min_p > 0:", ">= 0"): "at 0 the bound is log 0, which nothing is below",
    ("generation/drawing.py", "if self.temperature < 1e-6:", "<="): "at exactly this temperature both take the largest",
    ("generation/scoring.py", "length = min(model.config.context", "+ start"): "longer padding of the last window",
    ("generation/scoring.py", "return range(0, max(1, count - ", "count + context"): "windows without a new target",
    ("nn/taps.py", "v = jnp.repeat(jnp.where(is_read, v, 0)", ""): "values without weight may be any finite numbers",
    ("ops/meshes.py", "mesh, q = jax.typeof(leaves[at[0]]).sharding.mesh", "0 -> 1"): "all arrays are on one mesh",
    ("ops/schedule.py", "(128, 256, 512, 1024), max_scores", ""): "tiles of any size are right; no accelerator is here",
    ("testing/check.py", "for length in (2, 3, 5, 8)", ""): "any lengths that grow find a small call",
    ("training/optimizer.py", "jnp.minimum(weight, 1)", "1 -> 2"): "a weight exceeds 1 by its rounding alone",
}

SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """A replacement of one expression of a file: `source[start:end]`, offsets in bytes."""

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str

    @property
    def name(self):
        return f"{self.path}:{self.line} {self.before} -> {self.after}"


def mutations(node):
    """Every way in which a node is mutated, as new nodes."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
            yield ast.Compare(node.left, [SWAPS[type(operator)]()], node.comparators)
        case ast.BoolOp(op) if type(op) in SWAPS:
            yield ast.BoolOp(SWAPS[type(op)](), node.values)
        case ast.BinOp(left, op, right) if type(op) in SWAPS and not _is_text(left) and not _is_text(right):
            yield ast.BinOp(left, SWAPS[type(op)](), right)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Call(ast.Name(name), args, keywords) if name in NAMES:
            yield ast.Call(ast.Name(NAMES[name]), args, keywords)
        case ast.Call(ast.Attribute(value, name), args, keywords) if name in NAMES:
            yield ast.Call(ast.Attribute(value, NAMES[name]), args, keywords)


def _is_text(node):
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def mutants_of(path, source):
    """All mutants of a file, outside annotations, decorators and f-strings (whose columns are wrong in Python 3.11)."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def visit(node):
        if isinstance(node, ast.JoinedStr):
            return
        for new in mutations(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            yield Mutant(path, node.lineno, start, end, ast.unparse(node), ast.unparse(new))
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child)

    return list(visit(ast.parse(source)))


def draw(folders, count, seed):
    """The seeded list, with equally many mutants from each folder; editing other lines of a file hardly changes it."""
    drawn = []
    for folder in folders:
        places, occurrences = {}, collections.Counter()
        for file in sorted((ROOT / "attnlab" / folder).rglob("*.py")):
            for mutant in mutants_of(file.relative_to(ROOT).as_posix(), file.read_text()):
                text = f"{seed} {mutant.path} {mutant.before} {mutant.after}"
                occurrences[text] += 1
                places[hashlib.sha256(f"{text} {occurrences[text]}".encode()).hexdigest()] = mutant
        drawn += [places[place] for place in sorted(places)[: count // len(folders)]]
    return drawn


def replaced(source, mutant):
    """The source with the mutant in it."""
    data = source.encode()
    return (data[: mutant.start] + f"({mutant.after})".encode() + data[mutant.end :]).decode()


def marked(source, mutants):
    """The source, changed so that evaluating the expression of a (number, mutant) marks the number; they may nest."""
    inserts = []
    for number, mutant in mutants:
        length = mutant.end - mutant.start
        inserts.append((mutant.start, 1, -length, f"(__import__('_reached').mark({number}), "))
        inserts.append((mutant.end, 0, length, ")[1]"))
    data = source.encode()
    for at, _, _, text in sorted(inserts, reverse=True):
        data = data[:at] + text.encode() + data[at:]
    return data.decode()


REACHED = """
import os

_seen = set()

def mark(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if (number, test) not in _seen:
        _seen.add((number, test))
        with open(f"{os.environ['MUTANTS_REACHED']}/{os.getpid()}", "a") as file:
            file.write(f"{number} {test}\\n")
"""


def reach(mutants, workdir):
    """Runs the fast tests with marked mutants.

    Returns the tests that reach each mutant, the fastest first, and the tests that fail without a mutant.
    """
    tree = _copy(workdir / "reach")
    (workdir / "reached").mkdir()
    (workdir / "marks").mkdir()
    (workdir / "marks" / "_reached.py").write_text(REACHED)
    for path in {m.path for m in mutants}:
        here = [(number, mutant) for number, mutant in enumerate(mutants) if mutant.path == path]
        (tree / path).write_text(marked((ROOT / path).read_text(), here))
    environment = _environment(tree) | {"MUTANTS_REACHED": str(workdir / "reached")}
    environment["PYTHONPATH"] += os.pathsep + str(workdir / "marks")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *FAST, "--durations=0", "-vv"]
    with open(workdir / "reach.log", "w") as log:
        subprocess.run(command, cwd=tree, env=environment, stdout=log, stderr=log)
    log = (workdir / "reach.log").read_text()
    seconds = collections.Counter()
    for took, test in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(\S.*)$", log, re.M):
        seconds[test] += float(took)
    reached = collections.defaultdict(set)
    for file in (workdir / "reached").iterdir():
        for line in file.read_text().splitlines():
            number, test = line.split(" ", 1)
            reached[int(number)] |= {test} if test else set(_mirroring(mutants[int(number)], seconds))
    failing = re.findall(r"^(?:FAILED|ERROR) (\S+)", log, re.M)
    return {n: sorted(tests, key=lambda test: seconds[test]) for n, tests in reached.items()}, failing


def _mirroring(mutant, seconds):
    """The fast tests of a mutant's file or of its nearest folder, for expressions that are evaluated only on import."""
    path = Path(mutant.path.replace("attnlab/", "tests/", 1))
    path = path.with_name(f"test_{path.name}")
    while not (tests := [test for test in seconds if test.startswith(path.as_posix())]):
        path = path.parent
    return tests


def _copy(to):
    skip = shutil.ignore_patterns(".venv*", ".git", "build", ".*_cache", "__pycache__", "runs", ".hypothesis")
    shutil.copytree(ROOT, to, ignore=skip)
    return to


def _environment(tree):
    return os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def judge(tree, mutant, tests, deselected):
    """Runs the tests on a mutant: ("killed", failed test) or ("survived", how the run ended), and the seconds."""
    original = (tree / mutant.path).read_text()
    (tree / mutant.path).write_text(replaced(original, mutant))
    start = time.monotonic()
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *FAST, *deselected, *tests]
        process = subprocess.Popen(
            command, cwd=tree, env=_environment(tree), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, preexec_fn=_limit_processor_time,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=10 * SECONDS)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "killed", "it hangs", time.monotonic() - start
    finally:
        (tree / mutant.path).write_text(original)
    took = time.monotonic() - start
    if process.returncode == -signal.SIGXCPU:
        return "survived", f"no failure in {SECONDS} s", took
    if process.returncode == 0:
        return "survived", "all tests passed", took
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    return "killed", failed[0] if failed else output.strip().splitlines()[-1][:200], took


def why_excluded(mutant):
    line = (ROOT / mutant.path).read_text().splitlines()[mutant.line - 1]
    for (path, part, change), reason in EXCLUDED.items():
        if mutant.path == f"attnlab/{path}" and part in line and change in mutant.name:
            return reason
    return ""


def _limit_processor_time():
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, 2 * SECONDS))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", nargs="+", default=FOLDERS)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.csv")
    args = parser.parse_args()
    mutants = draw(args.folders, args.count, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder)
        reached, failing = reach(mutants, workdir)
        for test in failing:
            print(f"left out, as it fails without a mutant: {test}", flush=True)
        deselected = [f"--deselect={test}" for test in failing]
        trees = [_copy(workdir / f"tree{n}") for n in range(2)]

        def run(number):
            mutant = mutants[number]
            if reason := why_excluded(mutant):
                return number, "excluded", reason, 0.0
            tests = reached.get(number, ())
            if not tests:
                return number, "survived", "no fast test reaches it", 0.0
            tree = trees.pop()
            try:
                return number, *judge(tree, mutant, tests, deselected)
            finally:
                trees.append(tree)

        args.out.parent.mkdir(parents=True, exist_ok=True)
        with open(args.out, "w", newline="") as file, concurrent.futures.ThreadPoolExecutor(2) as pool:
            table = csv.writer(file)
            table.writerow(["number", "mutant", "verdict", "by", "seconds"])
            tally = collections.Counter()
            for number, verdict, by, took in pool.map(run, range(len(mutants))):
                table.writerow([number, mutants[number].name, verdict, by, round(took, 1)])
                file.flush()
                print(f"{number:3} {verdict:9} {took:5.1f} s  {mutants[number].name}  ({by})", flush=True)
                tally[mutants[number].path.split("/")[1], verdict] += 1
        for folder in args.folders:
            print(folder, {v: tally[folder, v] for v in ("killed", "survived", "excluded")})


if __name__ == "__main__":
    main()
