"""Benchmark activation patching of all heads against TransformerLens.

    python -m attnlab.bench see [--lens_python=lens/bin/python] [--sizes=gpt2] [--json=see.json]

The output z of every head is replaced, one head at a time, by that of another prompt; the metric is the difference of
two tokens' logits at the last position. All have the same random weights of GPT-2's shape (gpt2: 12 layers, 12 heads,
width 768; small: 4 layers, 4 heads, width 128) and the same prompts, and must find the same effects. TransformerLens
runs `get_act_patch_attn_head_out_all_pos`, one forward pass a head; "attnlab last" computes the logits of the last
position alone. The contenders alternate, each in a process of its own. Without transformer-lens attnlab runs alone.

Figures: seconds_SIZE_CONTENDER, first_seconds_SIZE_CONTENDER (the first call, with compilation), and
peak_mib_SIZE_CONTENDER; ratio_SIZE_CONTENDER, TransformerLens' time over attnlab's; difference_SIZE_CONTENDER, the
largest between their effects.
"""

import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from absl import flags

from attnlab.interop.huggingface import save_hf
from attnlab.nn import GPT
from attnlab.support import timing
from attnlab.support.errors import UserError

from .harness import options, workers

SIZES = {
    "small": {"num_layers": 4, "num_heads": 4, "width": 128},
    "gpt2": {"num_layers": 12, "num_heads": 12, "width": 768},
}
COUNTS = {
    "rounds": (5, "timed calls of each contender"),
    "length": (128, "tokens of a prompt"),
    "vocab_size": (50257, "tokens of the vocabulary"),
}
OURS = {"attnlab": {}, "attnlab last": {"last": True}}
PEER = "TransformerLens"
TOLERANCE = 1e-3  # of the effects over the largest: both compute in float32


def define(values, argv) -> None:
    """Define the flags."""
    meaning = "a Python with transformer-lens; this Python if not given"
    flags.DEFINE_string("lens_python", None, meaning, flag_values=values)
    options.define_common(values, SIZES, COUNTS)


def main(values) -> int:
    """Benchmark, and print the table."""
    options.check_common(values, SIZES, COUNTS)
    if values.vocab_size < 2:
        raise UserError(f"--vocab_size={values.vocab_size}: expected 2 or more, as the metric compares two tokens")
    python = _lens_python(values.lens_python)
    cases, rows = {}, {}
    for size in values.sizes:
        figures = cases.setdefault(f"{size}, {values.length} tokens", {})
        with _started(size, values.length, values.vocab_size, python) as running:
            first = {name: worker.ask("patch") for name, worker in running.items()}
            answers = workers.alternate(running, "patch", values.rounds, size)
            peaks = {name: worker.peak_mib for name, worker in running.items()}
        seconds = {name: [answer["seconds"] for answer in given] for name, given in answers.items()}
        print(timing.line(f"{size}, all heads", seconds), flush=True)
        for name, times in seconds.items():
            label = f"{size}_{name.replace(' ', '_')}"
            figures[f"seconds_{label}"] = statistics.median(times)
            figures[f"first_seconds_{label}"] = first[name]["seconds"]
            figures[f"peak_mib_{label}"] = peaks[name]
            row = {"s": f"{statistics.median(times):.2f}", "first call, s": f"{first[name]['seconds']:.2f}"}
            if python and name != PEER:
                figures[f"ratio_{label}"] = timing.ratio(seconds, PEER, name)
                figures[f"difference_{label}"] = _difference(first, name)
                row["times as fast"] = f"{figures[f'ratio_{label}']:.1f}"
                row["largest difference"] = f"{figures[f'difference_{label}']:.1g}"
            rows[f"{size}, {name}"] = row | {"peak memory, MiB": timing.mib(peaks[name])}
    timing.table(f"activation patching of all heads, {values.length} tokens", rows, caption="medians over rounds")
    options.keep_cases(values, "see", cases)
    return 0


def _lens_python(given: str | None) -> str | None:
    """The Python that has transformer-lens; None if none was given and this one has not."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('transformer_lens') is None)"
    python = given or sys.executable
    try:
        found = subprocess.run([python, "-c", find], capture_output=True).returncode == 0
    except OSError as error:
        raise UserError(f"--lens_python={given} cannot be started: {error.strerror}") from error
    if given and not found:
        raise UserError(f"--lens_python={given} has no transformer-lens: give a Python with it, or none")
    return python if found else None


@contextlib.contextmanager
def _started(size: str, length: int, vocab_size: int, python: str | None) -> Iterator[dict[str, workers.Worker]]:
    """Start a worker for each contender, on the same weights and prompts."""
    with tempfile.TemporaryDirectory(prefix="attnlab-race-") as folder, contextlib.ExitStack() as at_end:
        model = GPT(vocab_size=vocab_size, context=length, **SIZES[size])
        draw = np.random.default_rng(0)
        prompts = draw.integers(0, vocab_size, (2, length), dtype=np.int32)
        params = jax.jit(model.init)(jax.random.key(0), prompts[:, :1])
        request = {"folder": str(save_hf(Path(folder) / "gpt2", model, params)), "prompts": f"{folder}/prompts.npy"}
        np.save(request["prompts"], prompts)
        contenders = {name: workers.command("harness.patching") for name in OURS}
        if python:
            contenders[PEER] = [python, str(Path(__file__).parent / "harness" / "transformerlens.py")]
        running = {}
        for name, command in contenders.items():
            running[name] = workers.Worker(command, Path(folder) / f"{len(running)}.log")
            at_end.callback(running[name].close)
            print(f"{size}: starting {name}", flush=True)
            running[name].ask("start", answers=[0, 1], **request, **OURS.get(name, {}))
        yield running


def _difference(answers: dict[str, dict], name: str) -> float:
    """The largest difference of a contender's effects from TransformerLens'; UserError where it is no rounding."""
    ours, theirs = (np.array(answers[contender]["values"]) for contender in (name, PEER))
    found = float(np.abs(ours - theirs).max())
    if not found <= TOLERANCE * np.ptp(theirs):
        raise UserError(f"the effects of {name} and {PEER} differ by {found:.2g}, and range over {np.ptp(theirs):.2g}")
    return found
