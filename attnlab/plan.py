"""Compile a run for hardware that is not here: will it fit?

    attnlab plan --config=gpt2_124m --topology=v5e:4x4
    attnlab plan --config=gpt2_124m --topology=h100:8 --config.parallel.mesh.fsdp=8 --json=plan.json

The device's compiler compiles the training and evaluation steps; nothing is run. The table shows the memory that both
steps need on one device; the launches, bytes and FLOPs of a training step, and the least time that they take; the
attention backend, the kernels, and the collectives. TPUs need libtpu (pip install 'jax[tpu]'), H100s need JAX's CUDA
plugin (pip install 'jax[cuda13]'); --topology=here needs neither.

The exit code is 0 if the run fits, or if that is unknown; 1 if it does not fit; 2 for an error.
`python -m attnlab.plan` is the same command.
"""

import os
import sys

if "jax" not in sys.modules:  # XLA reads this when it is loaded; without it, XLA logs warnings about memory
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import functools
import json

import jax
from absl import flags

from attnlab import commands
from attnlab.planning import plans, topologies
from attnlab.planning.plans import Plan
from attnlab.support.errors import UserError
from attnlab.support.paths import new_file, write_text
from attnlab.training import precision


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return commands.run(_define, functools.partial(_main, own_process=argv is None), __doc__, argv)


def _define(values, argv):
    commands.define_import(values, argv)
    commands.define_config(values, argv)
    flags.DEFINE_string("topology", None, f"the devices: {topologies.NAMES}", flag_values=values)
    flags.DEFINE_string("json", None, "also write the plan to this new file", flag_values=values)
    flags.DEFINE_integer("vocab_size", None, "vocabulary size, if it depends on the text", flag_values=values)


def _main(values, own_process: bool) -> int:
    config, name = commands.config_of(values)
    if values.vocab_size is not None and not 1 <= values.vocab_size < 2**31:
        raise UserError(f"--vocab_size={values.vocab_size}: expected 1 or more, below 2^31")
    if not values.topology:
        raise UserError(f"--topology is missing: choose {topologies.NAMES}")
    file = None if values.json is None else new_file("--json", values.json)
    topology = topologies.find(values.topology)
    if own_process:
        jax.config.update("jax_enable_compilation_cache", False)  # because cache hits would hide the compile time
    planned = plans.plan(config, topology, values.vocab_size, name)
    print(table(planned), flush=True)
    if file is not None:
        write_text(file, json.dumps(planned.as_dict(), indent=2) + "\n")
    return 1 if planned.fits is False else 0


def table(planned: Plan) -> str:
    """The plan as lines of text."""
    topology, config, devices, training = planned.topology, planned.config, planned.devices, planned.training
    where = "compiled on this machine for" if topology.name == "here" else "compiled, but not run, for"
    kind = f"{devices} device{'s' * (devices > 1)} of kind {topology.devices[0].device_kind}"
    accumulation = config.optimizer.accumulation
    parts = f", in {accumulation} parts" if accumulation > 1 else ""
    computed = precision.described(config.precision)
    batch = f"{config.batch_size} sequences of {config.model.context:,} tokens{parts}, {computed}"
    layers, kernels = len(planned.attention), [f"{count} × {name}" for name, count in training.kernels.items()]
    backends = f"{', '.join(dict.fromkeys(planned.attention.values()))} ({layers} layer{'s' * (layers > 1)})"
    moved = [f"{count} {kind} ({_size(size)} GiB)" for kind, (count, size) in training.collectives.items()]
    rows = [
        ("fits", {True: "yes", False: "no", None: "unknown: this device does not report its memory"}[planned.fits]),
        ("model", f"{planned.parameters:,} parameters, vocabulary size {planned.vocab_size:,}"),
        ("batch", batch),
        ("mesh", " × ".join(f"{axis} {size}" for axis, size in planned.mesh.items())),
        ("attention", backends),
        *((f"  not {name}", why) for name, why in planned.attention_rejected.items()),
    ]
    if not training.refusal:
        work = f"{training.launches:,} launches, {training.moved / 1e9:.3g} GB moved, {planned.flops / 1e12:.3g} TFLOP"
        floor = "{1:.3g} ms at {2.bandwidth:g} TB/s, {0:.3g} ms at {2.tflops:g} TFLOP/s of bfloat16"
        rows += [
            ("work", f"{work} a step, on one device"),
            *(("floor", floor.format(*times, topology)) for times in [planned.floor] if times),
            ("collectives", ", ".join(moved) + " a step, over all its parts and layers" if moved else "none"),
            ("kernels", ", ".join(kernels) or "none"),
        ]
    title = f"{planned.name or 'the run'} on {topology.name}: {where} {kind}"
    width = max(len(name) for name, _ in rows)
    lines = [title, "", *_memory(planned), "", *(f"{name:<{width}}  {text}" for name, text in rows)]
    return "\n".join([*lines, *(f"note: {note}" for note in planned.notes)])


def _memory(planned: Plan) -> list[str]:
    """A table of the memory of each step, in GiB per device."""
    usable = planned.topology.usable_gib
    rows = [("GiB per device", "arguments", "temporaries", "peak", "of", "compiled in")]
    for name, step in (("training", planned.training), ("evaluation", planned.evaluation)):
        sizes = map(_size, (step.arguments, step.temporaries, step.peak, usable and round(usable * 2**30)))
        rows.append((f"{name} step", *sizes, "refused" if step.refusal else f"{step.compile_seconds:.0f} s"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{cell:>{size}}" for cell, size in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def _size(size: int | None) -> str:
    """Bytes as GiB, with more digits for a small program."""
    if size is None:
        return "–"
    gib = size / 2**30
    return f"{gib:.2f}" if gib >= 0.1 or gib == 0 else f"{gib:.5f}"


if __name__ == "__main__":
    sys.exit(main())
