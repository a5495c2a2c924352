"""Instruction bundles of TPU kernels, read from the texts that libtpu's compiler dumps.

A TPU core issues one bundle (VLIW) a cycle at best. The bundles of a stretch of code without loops are therefore a
lower bound of its cycles: waits for memory, stalls of busy units and the time between tiles are not in it.

A kernel visits its tiles in a loop, the grid, and computes each in a conditional region: the body. Of a dump, a body is
a longest run of bundles without the begin or the end of a region in between, and with matrix products in it.
"""

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Body(NamedTuple):
    """The instructions of a kernel for one tile."""

    start: int  # index of the first bundle
    bundles: int
    slots: dict[str, int]  # filled slots by unit; for MXU and XLU, which are held for several cycles, the cycles
    matmuls: int
    compares: int
    loops: int  # around the body: one is the grid's, and each further loop hides how often the bundles are issued


class Kernel(NamedTuple):
    """A dumped kernel, its bodies in the order of the program."""

    name: str  # as in the HLO text, e.g. "splash_mha_fwd_residuals.1"
    bundles: int
    capacity: dict[str, int]  # slots of one bundle by unit
    bodies: list[Body]


def dump_flags(folder: str | Path) -> str:
    """The value of LIBTPU_INIT_ARGS that dumps kernels into a folder; to be set before libtpu is loaded."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def read(folder: str | Path) -> list[Kernel]:
    """The kernels that were dumped into a folder, in the order of their names."""
    kernels = []
    for path in Path(folder).iterdir():
        # 1795356900442152893-splash_mha_fwd_residuals.1-72-final_bundles.txt
        name = re.fullmatch(r"(\d+)-(.+)-\d+-final_bundles\.txt", path.name)
        if name is None or name[2].endswith("schedule-analysis"):
            continue
        pattern = re.escape(f"{name[1]}-{name[2]}") + r"-\d+-final_hlo-static-per-bundle-utilization\.txt"
        utilization = [other for other in path.parent.iterdir() if re.fullmatch(pattern, other.name)]
        if len(utilization) != 1:
            raise ValueError(f"{path} has {len(utilization)} texts of utilization: expected one, of the same dump")
        kernels.append(parse(path.read_text(), utilization[0].read_text(), name[2]))
    return sorted(kernels)


def parse(bundles: str, utilization: str, name: str = "") -> Kernel:
    """The kernel of the texts `…-final_bundles.txt` and `…-final_hlo-static-per-bundle-utilization.txt`."""
    capacity, rows = _utilization(utilization)
    depths, operations, marks = _scan(bundles)
    if len(depths) != len(rows):
        raise ValueError(f"{name or 'a kernel'} has {len(depths)} bundles, but the utilization of {len(rows)}")
    bodies = []
    ends = sorted({0, *marks, len(rows)})
    for start, end in itertools.pairwise(ends):
        counts = sum(operations[start:end], Counter())
        if counts["vmatmul"]:
            slots = {unit: sum(row[at] for row in rows[start:end]) for at, unit in enumerate(capacity)}
            loops = max(depths[start:end])
            bodies.append(Body(start, end - start, slots, counts["vmatmul"], counts["vcmp"], loops))
    return Kernel(name, len(rows), capacity, bodies)


# "  0xf5 LB: > { %s1 = …": the index, a label, a ">" for each loop, instructions. Comments may take more lines.
_BUNDLE = re.compile(r" *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: *((?:> *)*)\{")
_OPERATION = re.compile(r"(?:\{|;;)(?: *%\w+ =)? *(v[a-z]\w*)")  # "vmatmul" of "vmatmul.bf16.gmra.mxu0"


def _scan(text: str) -> tuple[list[int], list[Counter], set[int]]:
    """For each bundle the loops around it and its vector instructions, and where regions begin or end."""
    depths, operations, marks = [], [], set()
    for line in text.splitlines():
        if bundle := _BUNDLE.match(line):
            if int(bundle[1], 16) != len(depths):
                raise ValueError(f"bundle {bundle[1]}: expected {len(depths):#x}, the next one")
            depths.append(bundle[2].count(">"))
            operations.append(Counter())
        if depths:  # the key of the labels comes before
            operations[-1].update(_OPERATION.findall(line))
            for what in re.findall(r"(Start/End|Start|End) (?:empty )?region \d+", line):
                marks.add(len(depths) if what == "End" else len(depths) - 1)
    return depths, operations, marks


def _utilization(text: str) -> tuple[dict[str, int], list[list[int]]]:
    """Slots of a bundle by unit, and for each bundle the slots that it fills."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("==")]
    units = re.split(r",\s*", lines[0]) if lines else []
    rows = [line.split() for line in lines[1:]]
    for row in rows or [[]]:
        if not row or len(row) != len(units) or not all(number.isdecimal() for number in row):
            raise ValueError(
                f"utilization {' '.join(row)!r}: expected the names of units, and in each line below a number for each"
            )
    capacity, *used = [[int(number) for number in row] for row in rows]
    return dict(zip(units, capacity)), used
