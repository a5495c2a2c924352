"""Count the instruction bundles of attention kernels compiled for a TPU, beside JAX's splash attention.

    python -m attnlab.bench bundles [--topology=v5e] [--cases=causal,window] [--head_dims=64,128] [--json=bundles.json]

No TPU is needed, and nothing runs on one: libtpu's compiler compiles each call for it, forward and backward in
bfloat16, and dumps the final bundles of its kernels. The figures are those of the code for one tile. They are A LOWER
BOUND OF CYCLES, NOT TIMES: no waits for memory, no stalls of busy units, nothing between tiles. Neither may a tile take
fewer cycles than the floor, which is what its products take of the matrix units at their peak.

attnlab has a body for FULL tiles, all of whose pairs are visible, and one for PARTIAL tiles, whose pairs are compared
with the mask; splash has one for all tiles, which compares if there is a mask. Of two bodies, PARTIAL is the
one that compares more. Backward is the sum of the kernels' bodies: dq, and dk with dv.
"""

import itertools
import math
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import attnlab
from attnlab import commands
from attnlab.masks import Causal, Segments, SlidingWindow
from attnlab.planning import bundles, programs, topologies
from attnlab.score_mods import ALiBi, SoftCap, alibi_slopes
from attnlab.support import timing
from attnlab.support.errors import UserError
from attnlab.support.names import nearest

from .harness import options, serving, workers

CASES = ("full", "causal", "window", "documents", "alibi", "softcap")
CONTENDERS = {"splash": "splash", "attnlab": "pallas"}  # the values of `impl`
HEADS, BATCH, TILES = 2, 2, 2  # TILES along each of queries and keys, so that the grid is a loop

_TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
# Multiplications and additions a cycle of one core's matrix units, in bfloat16: 4 arrays of 128 × 128
# (https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p}). How many rows a cycle the arrays of v6e and tpu7x take is not
# documented, so they have no floor here.
_MACS = {"v4": 65_536, "v5e": 65_536, "v5p": 65_536}
_LANES = 128  # a product that contracts over fewer features occupies the arrays as one over 128
# Products of one tile: those that contract over features, and those that contract over keys or queries.
_PRODUCTS = {"forward": (1, 1), "dq": (2, 1), "dkv": (2, 2)}

_COLUMNS = {
    "MXU": "MXU",
    "VALU": "VALU",
    "XLU": "XLU",
    "EUP": "EUP",
    "loads": "VLOAD",
    "fills": "VLOAD:FILL",
    "stores": "VSTORE",
    "spills": "VSTORE:SPILL",
    "scalar": "SALU",
}


class Call(NamedTuple):
    """A call to compile, forward and backward: one of CASES, one of CONTENDERS, and the features of a head."""

    head_dim: int
    case: str
    contender: str

    @property
    def label(self) -> str:
        return f"D = {self.head_dim}, {self.case}, {self.contender}"


class Row(NamedTuple):
    """The body of a kernel for one kind of tile.

    Attributes:
      kernel: "forward", "dq" or "dkv", or another name after "attnlab_".
      kind: "FULL", "PARTIAL", or "all" of a kernel with one body for both.
      capacity: slots of a bundle, by unit.
      body: of the dump.
    """

    kernel: str
    kind: str
    capacity: dict[str, int]
    body: bundles.Body


def define(values, argv) -> None:
    """Define the flags."""
    text = f"the TPU to compile for, e.g. {', '.join(_TPUS)}"
    flags.DEFINE_string("topology", "v5e", text, flag_values=values)
    options.define_choices(values, "cases", CASES, "masks and score mods")
    options.define_choices(values, "contenders", CONTENDERS, "contenders")
    flags.DEFINE_list("head_dims", ["64", "128"], "features per head", flag_values=values)
    flags.DEFINE_list("block_sizes", ["512", "512"], "queries and keys of a tile", flag_values=values)
    options.define_json(values)


def main(values) -> int:
    """Compile, count, and print the tables."""
    generation, head_dims, block_sizes = _checked(values)
    topologies.find(values.topology)  # an error of it is to come before anything else
    there = attnlab.implementations()
    contenders = [name for name in values.contenders if CONTENDERS[name] in there]
    for name in values.contenders:
        if name not in contenders:
            print(f"{name} is left out: attention has no impl={CONTENDERS[name]!r}")
    calls = [Call(*call) for call in itertools.product(head_dims, values.cases, contenders)]
    results = _measure(values.topology, block_sizes, calls)
    about = {"topology": values.topology, "jax": jax.__version__, "libtpu": metadata.version("libtpu")}
    floors = {(dim, kernel): floor(kernel, block_sizes, dim, generation) for dim in head_dims for kernel in _PRODUCTS}
    tile = "one tile of " + " × ".join(map(str, block_sizes))
    title = f"compiled for {values.topology}, JAX {about['jax']}, libtpu {about['libtpu']}"
    for head_dim in head_dims:
        _print_bodies(f"D = {head_dim}, {title}", tile, head_dim, results, floors)
    _print_summary(title, tile, results, floors)
    for call, result in results.items():
        if isinstance(result, str):
            print(f"– {call.label}: {result}")
    options.keep(values.json, about | _figures(block_sizes, results, floors))
    return 0


def _checked(values) -> tuple[str, list[int], list[int]]:
    """The TPU's generation, the head sizes, the tile."""
    generation = values.topology.partition(":")[0]
    if generation not in _TPUS:
        close = nearest(generation, _TPUS)
        raise UserError(f"--topology={values.topology} is not a TPU{close}: give {', '.join(_TPUS)}")
    options.check_known("cases", values.cases, CASES)
    options.check_known("contenders", values.contenders, CONTENDERS)
    head_dims, block_sizes = (options.whole_numbers(values, name) for name in ("head_dims", "block_sizes"))
    if len(block_sizes) != 2 or any(size % _LANES for size in block_sizes):
        given = ",".join(values.block_sizes)
        raise UserError(f"--block_sizes={given}: expected two multiples of {_LANES}, queries and keys, e.g. 512,512")
    options.check_new(values, "json")
    return generation, head_dims, block_sizes


def _measure(topology: str, block_sizes: list[int], calls: list[Call]) -> dict[Call, list[Row] | str]:
    """The rows of each call, or the reason why it has none."""
    results = {}
    with _Compilers(topology) as compilers:
        for call in calls:
            print(f"compiling {call.label}", flush=True)
            try:
                results[call] = rows_of(call, compilers.kernels(call, block_sizes))
            except (UserError, ValueError) as error:
                results[call] = commands.one_line(error)
    return results


def rows_of(call: Call, kernels: list[bundles.Kernel]) -> list[Row]:
    """The rows of a call.

    Raises:
      ValueError: the forward or the backward pass is missing, or a kernel has other bodies than expected.
    """
    matmuls = [kernel for kernel in kernels if kernel.bodies]
    found = {_computed(kernel.name): kernel for kernel in matmuls}
    if "forward" not in found or len(found) < 2 or len(found) != len(matmuls):
        names = ", ".join(kernel.name for kernel in matmuls) or "none"
        raise ValueError(f"kernels with matrix products: {names}; expected one forward, and others backward")
    order = [*(name for name in _PRODUCTS if name in found), *(name for name in found if name not in _PRODUCTS)]
    return [
        Row(name, kind, found[name].capacity, body)
        for name in order
        for kind, body in _kinds(name, found[name].bodies, call)
    ]


def _computed(kernel: str) -> str:
    """The pass that a kernel computes, from its name: splash_mha_fwd_residuals.1 → forward, attnlab_dq.3 → dq."""
    if splash := re.match(r"splash_m[hq]a_([a-z]+)", kernel):
        return "forward" if splash[1] == "fwd" else splash[1]
    return kernel.partition(".")[0].removeprefix("attnlab_")


def _kinds(kernel: str, bodies: list[bundles.Body], call: Call) -> list[tuple[str, bundles.Body]]:
    """The kind of tiles that each body is for, and the body."""
    expected = (1,) if call.contender == "splash" else (1, 2)
    found = " and ".join(f"{body.bundles} bundles with {body.matmuls} matmuls" for body in bodies)
    if len(bodies) not in expected or any(body.loops > 1 for body in bodies):
        raise ValueError(f"{kernel} has {found}: expected one body without a loop for each kind of tile")
    if len(bodies) == 1:
        kind = "all" if call.contender == "splash" else "FULL" if call.case == "full" else "PARTIAL"
        return [(kind, bodies[0])]
    full, partial = sorted(bodies, key=lambda body: body.compares)
    if full.matmuls != partial.matmuls or full.compares == partial.compares:
        raise ValueError(f"{kernel} has {found}: expected as many matmuls, and more comparisons in one of them")
    return [("FULL", full), ("PARTIAL", partial)]


def floor(kernel: str, block_sizes: Sequence[int], head_dim: int, generation: str) -> int | None:
    """Cycles that the products of one tile take of a generation's matrix units at their peak; None if not known.

    >>> [floor(kernel, (512, 512), head_dim, "v5e") for kernel in ("forward", "dq", "dkv") for head_dim in (64, 128)]
    [768, 1024, 1280, 1536, 1536, 2048]
    """
    if generation not in _MACS:
        return None
    over_features, over_pairs = _PRODUCTS[kernel]
    features = over_features * math.ceil(head_dim / _LANES) * _LANES + over_pairs * head_dim
    return math.ceil(math.prod(block_sizes) * features / _MACS[generation])


def _print_bodies(title: str, tile: str, head_dim: int, results: dict[Call, list[Row] | str], floors: dict) -> None:
    """A line for each body."""
    cells, capacity = {}, "nothing was compiled"
    for call, rows in results.items():
        label = f"{call.case:<9} {call.contender:<7}"
        if call.head_dim != head_dim:
            continue
        if isinstance(rows, str):
            cells[label] = {"bundles ≥": "–"}
            continue
        for row in rows:
            figures = {"bundles ≥": row.body.bundles, "floor": floors.get((head_dim, row.kernel))}
            figures |= {column: row.body.slots[unit] for column, unit in _COLUMNS.items()}
            figures["compares"] = row.body.compares
            texts = {name: "–" if figure is None else f"{figure:,}" for name, figure in figures.items()}
            cells[f"{label} {row.kernel:<7} {row.kind}"] = texts
            capacity = ", ".join(f"{column} {row.capacity[unit]}" for column, unit in _COLUMNS.items())
    caption = (
        f"{tile} × D. bundles: a lower bound of cycles, not a time. floor: cycles of the matrix units at their peak. "
        "Of each unit the slots that are filled, of MXU and XLU the cycles that they are held; slots of one bundle: "
        f"{capacity}. loads and stores include fills and spills. compares: vector comparisons"
    )
    timing.table(f"Bundles, a lower bound of cycles: {title}", cells, caption)


def _print_summary(title: str, tile: str, results: dict[Call, list[Row] | str], floors: dict) -> None:
    """A line for each pass of a case, a column for each contender and kind of tile."""
    cells: dict[str, dict[str, str]] = {}
    for which, (head_dim, case) in itertools.product(("forward", "backward"), dict.fromkeys(c[:2] for c in results)):
        of_pass = [floors[head_dim, kernel] for kernel in _PRODUCTS if _pass(kernel) == which]
        lowest = "–" if None in of_pass else f"{sum(of_pass):,}"
        line = cells[f"{which:<8} D = {head_dim:<3} {case}"] = {"floor": lowest}
        bounds: dict[str, int | None] = {}
        for call, rows in results.items():
            if call[:2] != (head_dim, case):
                continue
            if isinstance(rows, str):
                bounds[call.contender] = None
                continue
            for row in rows:
                if _pass(row.kernel) == which:
                    name = call.contender if row.kind == "all" else f"{call.contender} {row.kind}"
                    bounds[name] = bounds.get(name, 0) + row.body.bundles
        for name, bound in bounds.items():
            line[name] = _cell(bound, None if name == "splash" else bounds.get("splash"))
    caption = f"{tile} × D; bundles, a lower bound of cycles, not a time (× those of splash)"
    timing.table(f"Bundles, a lower bound of cycles: all kernels, {title}", cells, caption)


def _cell(bound: int | None, reference: int | None) -> str:
    """The bundles, and their ratio to the reference's; a dash where there are none."""
    if bound is None:
        return "–"
    return f"{bound:,} ({bound / reference:.2f})" if reference else f"{bound:,}"


def _pass(kernel: str) -> str:
    return "forward" if kernel == "forward" else "backward"


def _figures(block_sizes: list[int], results: dict[Call, list[Row] | str], floors: dict) -> dict:
    """The figures for --json: a list of bodies, and of calls that have none."""
    bodies, refused = [], []
    for call, rows in results.items():
        if isinstance(rows, str):
            refused.append(call._asdict() | {"reason": rows})
            continue
        for row in rows:
            figures = {"kernel": row.kernel, "kind": row.kind, "floor": floors.get((call.head_dim, row.kernel))}
            bodies.append(call._asdict() | figures | {"capacity": row.capacity} | row.body._asdict())
    meaning = "bundles of the code for one tile: a lower bound of cycles, not times"
    return {"meaning": meaning, "block_sizes": block_sizes, "bodies": bodies, "refused": refused}


class _Compilers:
    """A process that compiles, and a new one when it has failed: libtpu ends the process for some programs."""

    def __init__(self, topology: str):
        self._topology, self._worker = topology, None

    def __enter__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="attnlab-bundles-"))
        return self

    def __exit__(self, *_):
        self._stop()
        shutil.rmtree(self._folder)

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def kernels(self, call: Call, block_sizes: list[int]) -> list[bundles.Kernel]:
        """The kernels of a call.

        Raises:
          UserError: the call is refused, or the process ended.
        """
        try:
            if self._worker is None:
                command = workers.command("bundles")
                self._worker = workers.Worker(command, self._folder / "log")
                self._worker.ask("start", topology=self._topology, folder=str(self._folder))
            answer = self._worker.ask("kernels", **call._asdict(), block_sizes=block_sizes)
        except UserError:
            self._stop()
            raise
        if "refused" in answer:
            raise UserError(answer["refused"])
        return [
            bundles.Kernel(name, count, capacity, [bundles.Body(*body) for body in bodies])
            for name, count, capacity, bodies in answer["kernels"]
        ]


class Compiler:
    """Compiles in a process of its own, as the flags for dumps are read when libtpu is loaded.

    Args:
      topology: name of the TPU.
      folder: for the dumps.
    """

    def __init__(self, topology: str, folder: str):
        self._folder = Path(folder) / "dump"
        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = f"{given} {bundles.dump_flags(self._folder)}".strip()
        device = topologies.find(topology).devices[0]
        jax.config.update("jax_enable_compilation_cache", False)  # a program that is read back is not dumped
        self._mesh = Mesh(np.array([device], dtype=object), ("chip",), axis_types=(AxisType.Auto,))

    def kernels(self, head_dim: int, case: str, contender: str, block_sizes: list[int]) -> dict:
        """The kernels of a call with this tile, forward and backward.

        Returns:
          `kernels`, as `bundles.read` gives them, or `refused`, the reason why the contender cannot run the call.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        length = TILES * math.lcm(*block_sizes)
        q, ids = self._shape((BATCH, length, HEADS, head_dim), jnp.bfloat16), self._shape((BATCH, length), jnp.int32)

        def run(q, k, v, ids, d_out):
            terms = _terms(case, ids, min(block_sizes))
            impl = CONTENDERS[contender]

            def attend(q, k, v):
                return attnlab.attention(q, k, v, **terms, impl=impl, block_sizes=tuple(block_sizes))

            out, pull = jax.vjp(attend, q, k, v)
            return out, pull(d_out)

        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):  # Pallas asks it which TPU to compile for
            try:
                traced = jax.jit(run).trace(q, q, q, ids, q)
            except ValueError as error:
                return {"refused": commands.one_line(error)}
            program = programs.compile(traced.lower(lowering_platforms=("tpu",)))
        if not program.fits:
            return {"refused": program.refusal}
        kernels = bundles.read(self._folder)
        return {"kernels": [kernel for kernel in kernels if kernel.name.startswith(("attnlab_", "splash_"))]}

    def _shape(self, shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self._mesh, PartitionSpec()))


def _terms(case: str, ids, size: int) -> dict:
    """Mask and score mod of a case."""
    return {
        "full": {},
        "causal": {"mask": Causal()},
        "window": {"mask": SlidingWindow(left=size - 1)},  # as wide as a tile: none of them is FULL
        "documents": {"mask": Causal() & Segments(ids)},
        "alibi": {"mask": Causal(), "score_mod": ALiBi(alibi_slopes(HEADS))},
        "softcap": {"mask": Causal(), "score_mod": SoftCap(50.0)},
    }[case]


def work() -> None:
    """Answer requests, in a process that may crash."""
    serving.serve(Compiler)
