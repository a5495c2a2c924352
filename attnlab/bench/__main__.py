"""Benchmarks against other libraries, and fault-injection campaigns.

    python -m attnlab.bench NAME [--help]

for example

    python -m attnlab.bench attention
    python -m attnlab.bench train --peer_path=nanoGPT --peer_python=torch/bin/python
    python -m attnlab.bench faults --kills=10
"""

import importlib
import sys

from attnlab import commands
from attnlab.config import nearest

BENCHMARKS = {
    "attention": "the operator against jax.nn, torch, tokamax and attnax: time and peak memory",
    "train": "training against nanoGPT: tokens a second and peak memory",
    "loss": "training to the loss that nanoGPT reaches: seconds, and the loss after as many tokens",
    "decode": "sampling against nanoGPT: tokens a second",
    "decoding": "eight prompts side by side against one, and n-gram drafts against none: tokens a second",
    "see": "activation patching of all heads against TransformerLens: time and peak memory",
    "seeds": "training one small model from several seeds: one after another, and side by side",
    "start": "seconds from the command to the first training step, and to the first sampled character",
    "data": "the data pipeline: how fast batches come, and how a text larger than memory is tokenised",
    "gpu": "on a GPU: the operator's correctness and speed, and training, against jax.nn, torch and nanoGPT",
    "bundles": "compiled for a TPU: the bundles of attention kernels, a lower bound of cycles, beside splash attention",
    "saving": "the time that saving checkpoints takes from training",
    "faults": "kill, stop, damage and misuse training runs; count what goes wrong",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    argv = list(sys.argv if argv is None else argv)
    name = argv[1] if len(argv) > 1 else "--help"
    if name in ("--help", "-h"):
        listed = "\n".join(f"  {name:<10} {summary}" for name, summary in BENCHMARKS.items())
        print(f"{__doc__.strip()}\n\nBenchmarks:\n{listed}")
        return 0
    if name not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        print(f"error: unknown benchmark {name!r}{nearest(name, BENCHMARKS)}: use one of {known}", file=sys.stderr)
        return 2
    benchmark = importlib.import_module(f"attnlab.bench.{name}")
    return commands.run(benchmark.define, benchmark.main, benchmark.__doc__, [argv[0], *argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
