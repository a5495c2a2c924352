"""Benchmarks against other libraries.

    python -m attnlab.bench NAME [--help]

for example

    python -m attnlab.bench attention
    python -m attnlab.bench train --peer_path=nanoGPT --peer_python=torch/bin/python
"""

import sys

from attnlab import commands
from attnlab.support import shipped
from attnlab.support.names import nearest

WORKER = "--worker"  # the next word names a module to run for another process: see benchmarks/harness/workers.py


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    argv = list(sys.argv if argv is None else argv)
    name = argv[1] if len(argv) > 1 else "--help"
    benchmarks = shipped.files("benchmarks")
    if name in ("--help", "-h"):
        width = max(map(len, benchmarks))
        lines = (f"  {name:<{width}}  {shipped.summary(file)}" for name, file in benchmarks.items())
        print(f"{(__doc__ or '').strip()}\n\nBenchmarks:")
        print("\n".join(lines))
        return 0
    if name == WORKER:
        shipped.module("benchmarks", argv[2]).work(*argv[3:])
        return 0
    if name not in benchmarks:
        known = ", ".join(benchmarks)
        print(f"error: unknown benchmark {name!r}{nearest(name, benchmarks)}: use one of {known}", file=sys.stderr)
        return 2
    benchmark = shipped.module("benchmarks", name)
    return commands.run(benchmark.define, benchmark.main, benchmark.__doc__, [argv[0], *argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
