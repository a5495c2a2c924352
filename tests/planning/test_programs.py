"""Compiled programs: what is read from HLO texts, and from a compiler's refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attnlab.planning import programs

LOOP = """HloModule jit_f, entry_computation_layout={()->f32[]}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (arg: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %arg = (s32[], f32[8,4]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%arg), index=1
  %i.copy = s32[] copy(%i)
  %one = s32[] constant(STEP)
  %next = s32[] add(%i.copy, %one)
  %y = f32[8,4]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  ROOT %out = (s32[], f32[8,4]{1,0}) tuple(%next, %y)
}

%condition (arg.1: (s32[], f32[8,4])) -> pred[] {
  %n = s32[] constant(6)
  %arg.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (x.1: f32[8,4]) -> f32[8,4] {
  %x.1 = f32[8,4]{1,0} parameter(0)
  %zero = s32[] START
  %zero.copy = s32[] copy(%zero)
  %start = (s32[], f32[8,4]{1,0}) tuple(%zero.copy, %x.1)
  %loop = (s32[], /*index=1*/f32[8,4]{1,0}) while(%start), condition=%condition, body=%bodyCONFIG
  ROOT %y.1 = f32[8,4]{1,0} get-tuple-element(%loop), index=1
}
"""


def loop(start="constant(0)", step="1", config=""):
    return programs.parse(LOOP.replace("START", start).replace("STEP", step).replace("CONFIG", config))


@pytest.mark.parametrize(
    "options, count, unknown",
    [
        ({}, 6, 0),
        ({"start": "constant(2)"}, 4, 0),
        ({"step": "4"}, 2, 0),
        ({"start": "constant(9)"}, 0, 0),
        ({"start": "parameter(1)"}, 1, 1),
        ({"start": "parameter(1)", "config": ', backend_config={"known_trip_count":{"n":"12"}}'}, 12, 0),
    ],
    ids=str,
)
def test_collectives_of_a_loop_count_as_often_as_it_runs(options, count, unknown):
    counts, loops = programs.collectives(loop(**options))
    assert (counts["all-reduce"], loops) == ([count, count * 8 * 4 * 4], unknown)


def entry(*lines, others=""):
    """An HLO text whose entry computation has these instructions."""
    body = "\n".join(f"  {line}" for line in lines)
    return programs.parse(f"HloModule m\n\n{others}\nENTRY %main () -> f32[] {{\n{body}\n}}\n")


@pytest.mark.parametrize(
    "line, kind, size",
    [
        ("%r = bf16[4,2]{1,0} all-reduce(%a), channel_id=1, to_apply=%add", "all-reduce", 16),
        ("%r = (f32[4]{0}, f32[2]{0}) all-reduce-start(%a, %b), channel_id=1", "all-reduce", 24),
        ("%r = ((f32[4]{0}), f32[4]{0}) all-reduce-start(%a), channel_id=1", "all-reduce", 16),
        ("%r = ((f32[2], s4[3]), (f32[8], s4[6])) all-gather-start(%a, %b), channel_id=1", "all-gather", 35),
        ("%r = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(%a)", "collective-permute", 8),
        ("%r = (f32[2]{0}, f32[2]{0}) all-to-all(%a, %b), channel_id=3", "all-to-all", 16),
        ("%r = f32[2]{0} reduce-scatter(%a), channel_id=1", "reduce-scatter", 64),
        ("%r = f32[2]{0} reduce-scatter(f32[8]{0} %other), channel_id=1", "reduce-scatter", 32),
        ("%r = ((f32[16]{0}), f32[2]{0}) reduce-scatter-start(%a), channel_id=1", "reduce-scatter", 64),
    ],
)
def test_collective_has_the_bytes_of_its_results(line, kind, size):
    computations = entry("%a = f32[16]{0} parameter(0)", line, "%d = f32[8] all-gather-done(%r)")
    assert programs.collectives(computations) == ({kind: [1, size]}, 0)


FUSIONS = """
%start (p: f32[2]) -> f32[8] {
  ROOT %g = f32[8]{0} all-gather(%p), channel_id=15
}

%overlapped (p.1: f32[2]) -> f32[8] {
  ROOT %g.1 = f32[8]{0} all-gather(%p.1), channel_id=15
}

%all-reduce-scatter.1.clone (p.2: f32[8]) -> f32[2] {
  %r = f32[8]{0} all-reduce(%p.2), channel_id=16, to_apply=%add
  ROOT %s = f32[2]{0} dynamic-slice(%r), dynamic_slice_sizes={2}
}

%sparsecore (p.3: f32[8]) -> f32[8] {
  ROOT %r.3 = f32[8]{0} all-reduce(%p.3), channel_id=17, to_apply=%add
}, execution_thread="sparsecore"
"""


def test_collective_that_a_tpu_spreads_over_fusions_counts_once():
    computations = entry(
        "%a = f32[8]{0} fusion(%x), kind=kCustom, calls=%start",
        "%b = f32[8]{0} fusion(%x, %a), kind=kCustom, calls=%overlapped",
        "%c = f32[2]{0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1.clone",
        '%d = ((), ()) call-start(), async_execution_thread="sparsecore", to_apply=%sparsecore',
        "ROOT %e = f32[8]{0} call-done(%d)",
        others=FUSIONS,
    )
    assert programs.collectives(computations) == (
        {"all-reduce": [1, 32], "all-gather": [1, 32], "reduce-scatter": [1, 32]},
        0,
    )


def test_kernels_are_counted_by_name_and_lines_of_metadata_are_skipped():
    computations = entry(
        '%splash_fwd.2 = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel={',
        '"metadata":"{}"',
        '}}, metadata={op_name="f(x)"}',
        '%splash_fwd.3.clone.1 = f32[8] custom-call(%x), custom_call_target="tpu_custom_call"',
        '%c = (bf16[2], u8[4]) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"',
        '%m = f32[8] custom-call(%x), custom_call_target="ConcatBitcast"',
    )
    targets, kernels = programs.custom_calls(computations)
    assert targets == {"tpu_custom_call": 2, "__cudnn$fmhaSoftmax": 1, "ConcatBitcast": 1}
    assert kernels == {"splash_fwd": 2, "cudnn_fmhaSoftmax": 1}


SLICES = """
%layer (stack: f32[6,8,4], out: f32[6,4], at: s32[]) -> (f32[6,4], f32[8,4]) {
  %stack = f32[6,8,4]{2,1,0} parameter(0)
  %flat = f32[48,4]{1,0} bitcast(%stack)
  %at = s32[] parameter(2)
  %one = f32[8,4]{1,0} dynamic-slice(%flat, %at), dynamic_slice_sizes={8,4}
  %sum = f32[1,4]{1,0} reduce(%one), dimensions={0}, to_apply=%add
  %out = f32[6,4]{1,0} parameter(1)
  %in_place = f32[6,4]{1,0} dynamic-update-slice(%out, %sum, %at)
  ROOT %both = (f32[6,4]{1,0}, f32[8,4]{1,0}) tuple(%in_place, %one)
}
"""


@pytest.mark.parametrize(
    "line, launches, moved",
    [
        ("%r = f32[6,4]{1,0} copy(%y)", 1, 192),
        ("%r = (f32[6,4], f32[6,4], u32[]) copy-start(%y)", 1, 96 + 96),  # with its copy-done
        ("%r = (f32[6,4], f32[8,4]) fusion(%x, %y, %n), kind=kLoop, calls=%layer", 1, 128 + 16 + 128 + 4),
        ("%r = ((f32[6,8,4]), (f32[6,4])) fusion-start(%x, %y, %n), kind=kLoop, calls=%layer", 1, 276),
        ("%r = f32[8,4] dynamic-slice(%x, %n), dynamic_slice_sizes={1,8,4}", 1, 128 + 4 + 128),
        ("%r = f32[6,4] dynamic-update-slice(%y, %z, %n)", 1, 16 + 4 + 16),
        ("%r = f32[2,4] gather(%y, %m), slice_sizes={1,4}", 1, 32 + 8 + 32),
        ("%r = f32[6,4]{1,0:T(8,128)S(1)} add(%y, %y)", 1, 96),  # the sum is in a TPU's vector memory
        ("%r = f32[24]{0} bitcast(%y)", 0, 0),
    ],
)
def test_work_is_what_instructions_read_and_write(line, launches, moved):
    arrays = "%x = f32[6,8,4] parameter(0)", "%y = f32[6,4] parameter(1)", "%n = s32[] parameter(2)"
    arrays += "%z = f32[1,4] parameter(3)", "%m = s32[2] parameter(4)"
    ends = {"copy-start": "%e = f32[6,4] copy-done(%r)", "fusion-start": "%e = f32[6,4] fusion-done(%r)"}
    computations = entry(*arrays, line, *(end for start, end in ends.items() if start in line), others=SLICES)
    assert programs.work(computations) == (launches, moved)


def test_work_of_a_loop_counts_as_often_as_it_runs():
    # Two copies of s32[], an addition of two of them, an all-reduce: 7 numbers, 64 more.
    launches, moved = programs.work(loop(start="constant(2)"))
    assert (launches, moved) == (1 + 4 * 3, 8 + 4 * (8 + 12 + 2 * 128))


@pytest.mark.parametrize(
    "message, needed",
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.52G of 15.75G hbm. Exceeded", 17.52),
        ("RESOURCE_EXHAUSTED: E1000: the total (640.5G) exceeds available HBM (95.73G). HLO module: f.", 640.5),
        ("RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out of VMEM", None),
    ],
)
def test_refusal_has_the_memory_that_the_compiler_names(message, needed):
    program = programs.refused(message, seconds=1.0)
    assert (None if program.peak is None else round(program.peak / 2**30, 2)) == needed
    assert message.endswith(program.refusal) and not program.refusal.startswith("RESOURCE_EXHAUSTED")


def test_out_of_memory_is_a_result_and_other_failures_raise(monkeypatch):
    lowered, message = jax.jit(jnp.sin).lower(jnp.ones(3)), "RESOURCE_EXHAUSTED: no"

    def fail(self):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    assert programs.compile(lowered).refusal == "no"
    message = "INTERNAL: no"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        programs.compile(lowered)


def test_compiled_scan_over_sharded_layers_counts_each_layer():
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def loss(layers, x):
        return jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, layers)[0].sum()

    def shape(size, spec):
        return jax.ShapeDtypeStruct(size, jnp.float32, sharding=NamedSharding(mesh, spec))

    lowered = jax.jit(jax.grad(loss)).lower(shape((5, 16, 16), P()), shape((8, 16), P("x")))
    program = programs.compile(lowered)
    assert not program.refusal and program.unknown_loops == 0
    # The gradient of each layer is summed over the devices: in the loop, or once for all layers after it.
    assert program.collectives["all-reduce"][1] >= 5 * 16 * 16 * 4
    assert program.peak >= program.arguments == 5 * 16 * 16 * 4 + 8 * 16 * 4 // len(jax.devices())
