"""Compile a run for hardware that is not here: will it fit?

    attnlab plan --config=gpt2_124m --topology=v5e:4x4
    attnlab plan --config=gpt2_124m --topology=h100:8 --config.parallel.mesh.fsdp=8 --json=plan.json --suggest

The training, evaluation and decode steps of the run are compiled by the real compiler, and never run. The table has
the memory that they need on one device, the collectives, the attention kernels, and two lower bounds on the time of a
step. TPUs need libtpu (pip install 'jax[tpu]'), H100s JAX's CUDA plugin (pip
install 'jax[cuda13]'); --topology=here needs neither.

The exit code is 0 if the run fits, or if that is unknown; 1 if it does not fit; 2 for an error.
`python -m attnlab.plan` is the same command.
"""

import os
import sys

if "jax" not in sys.modules:  # XLA reads it when it is loaded, and otherwise it warns of memory
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import functools
import json
from pathlib import Path

import jax
from absl import flags

from attnlab import commands
from attnlab.planning import plans, topologies
from attnlab.planning.plans import Plan, Suggestion
from attnlab.planning.programs import Program
from attnlab.support import files
from attnlab.support.errors import UserError
from attnlab.support.paths import write_text


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return commands.run(_define, functools.partial(_main, own_process=argv is None), __doc__, argv)


def _define(values, argv):
    commands.define_mixer(values, argv)
    commands.define_config(values, argv)
    flags.DEFINE_string("topology", None, f"the devices: {topologies.NAMES}", flag_values=values)
    flags.DEFINE_string("json", None, "also write the plan to this file", flag_values=values)
    flags.DEFINE_bool("suggest", False, "if it does not fit: compile changes with which it may", flag_values=values)
    flags.DEFINE_integer("vocab_size", None, "size of the vocabulary, where it depends on the text", flag_values=values)


def _main(values, own_process: bool) -> int:
    config, name = commands.config_of(values)
    if values.vocab_size is not None and not 1 <= values.vocab_size < 2**31:
        raise UserError(f"--vocab_size={values.vocab_size}: expected 1 or more, below 2^31")
    if not values.topology:
        raise UserError(f"--topology is missing: there are {topologies.NAMES}")
    file = None if values.json is None else _checked_file(values.json)
    topology = topologies.find(values.topology)
    if own_process:
        jax.config.update("jax_enable_compilation_cache", False)  # whose hits would not count as seconds of compiling
    planned = plans.plan(config, topology, values.vocab_size, name)
    print(table(planned), flush=True)
    suggestions = []
    if values.suggest and planned.fits is False:
        print("\nchanges with which it fits, and the peak of the training step then:", flush=True)
        for suggestion in plans.suggest(config, topology, planned):
            print(line(suggestion, planned), flush=True)
            suggestions.append(suggestion)
        if not suggestions:
            print("  none of those tried (remat, accumulation, fsdp, half the batch)")
    if file is not None:
        found = [{**suggestion.overrides, "peak_gib": suggestion.peak_gib} for suggestion in suggestions]
        content = planned.as_dict() | ({"suggestions": found} if values.suggest else {})
        write_text(file, json.dumps(content, indent=2) + "\n")
    return 1 if planned.fits is False else 0


def _checked_file(name: str) -> Path:
    """The path of a new file, or of an earlier plan; UserError for any other."""
    file = Path(name)
    try:
        if file.is_dir() or not file.parent.is_dir():
            raise UserError(f"--json={name} cannot be written: name a file in a folder that exists")
        if not file.exists():
            if not os.access(file.parent, os.W_OK):
                raise UserError(f"--json={name} cannot be written: {file.parent} is read-only: choose another folder")
            return file
        earlier = files.read_json(file)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        earlier = None
    except OSError as error:
        raise UserError(f"--json={name} cannot be written ({error.strerror}): choose another file") from error
    if not isinstance(earlier, dict) or "topology" not in earlier:
        raise UserError(f"--json={name} exists and is not a plan: choose another file")
    return file


def table(planned: Plan) -> str:
    """The plan as lines of text."""
    topology, config, devices = planned.topology, planned.config, planned.devices
    where = "compiled on this machine" if topology.name == "here" else "compiled for, never run on"
    kind = f"{devices} device{'s' * (devices > 1)} of kind {topology.chip.kind}"
    accumulation = config.optimizer.accumulation
    parts = f", in {accumulation} parts" if accumulation > 1 else ""
    batch = f"{config.batch_size} sequences of {config.model.context:,} tokens{parts}, {config.precision}"
    rows = [
        ("fits", {True: "yes", False: "no", None: "unknown: nothing tells this device's memory"}[planned.fits]),
        ("model", f"{planned.parameters:,} parameters, vocabulary size {planned.vocab_size:,}"),
        ("batch", batch),
        ("mesh", " × ".join(f"{axis} {size}" for axis, size in planned.mesh.items())),
        ("remat", "none (in a loop: as dots)" if planned.scan and config.model.remat == "none" else config.model.remat),
        ("layers", f"{config.model.num_layers}, {'as one loop' if planned.scan else 'one by one'}"),
        ("attention", _attention(planned)),
        *((f"  not {name}", why) for name, why in planned.attention_rejected.items()),
        ("collectives", _collectives(planned.training)),
        ("kernels", _kernels(planned.training)),
        ("FLOPs", f"{planned.flops_per_step:.3g} a step"),
        ("bounds", _bounds(planned)),
    ]
    title = f"{planned.name or 'the run'} on {topology.name}: {where} {kind}"
    width = max(len(name) for name, _ in rows)
    lines = [title, "", *_memory(planned), "", *(f"{name:<{width}}  {text}" for name, text in rows)]
    return "\n".join([*lines, *(f"note: {note}" for note in planned.notes)])


def _memory(planned: Plan) -> list[str]:
    """The memory of each step, GiB of one device, by columns."""
    limit = planned.device_bytes
    header = ("GiB per device", "arguments", "temporaries", "code", "peak", "of", "compiled in")
    rows = [header]
    steps = {"training": planned.training, "evaluation": planned.evaluation, "decode": planned.decoding}
    for name, step in steps.items():
        sizes = [_size(size) for size in (step.arguments, step.temporaries, step.code, step.peak, limit)]
        sizes[3] += "*" if step.fits and step.peak_from == "compiler" else " "
        rows.append((f"{name} step", *sizes, f"{step.compile_seconds:.0f} s" if step.fits else "refused"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{cell:>{size}}" for cell, size in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def _size(size: int | None) -> str:
    """Bytes as GiB, with the digits that a small program needs."""
    if size is None:
        return "–"
    gib = size / 2**30
    return f"{gib:.2f}" if gib >= 0.1 or gib == 0 else f"{gib:.5f}"


def _attention(planned: Plan) -> str:
    backends = list(planned.attention.values())
    layers = planned.config.model.num_layers
    names = ", ".join(dict.fromkeys(backends))
    return f"{names} ({layers} layer{'s' * (layers > 1)})"


def _kernels(step: Program) -> str:
    if not step.fits:
        return "not known"
    return ", ".join(f"{count} × {name}" for name, count in step.kernels.items()) or "none"


def _collectives(step: Program) -> str:
    if not step.fits:
        return "not known"
    counts = [f"{count} {kind} ({_size(size)} GiB)" for kind, (count, size) in step.collectives.items()]
    return ", ".join(counts) + " a step, over all its parts and layers" if counts else "none"


def _bounds(planned: Plan) -> str:
    if planned.least_seconds_flops is None or planned.least_seconds_memory is None:
        return "unknown: this device's peak and bandwidth are not known"
    return (
        f"lower bounds on a step's time, not estimates: {planned.least_seconds_flops:.2g} s by its FLOPs at the "
        f"bfloat16 peak, {planned.least_seconds_memory:.2g} s by its state, read and written once"
    )


def line(suggestion: Suggestion, planned: Plan) -> str:
    """A suggestion as options of the command, and the memory that the training step then needs."""
    options = " ".join(f"--config.{field}={value}" for field, value in suggestion.overrides.items())
    return f"  {options}  → {suggestion.peak_gib:.2f} of {planned.device_bytes / 2**30:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main())
