"""Profiles of compiled programs."""

import jax
import jax.numpy as jnp

from attnlab._benchmarks.harness import profiling


def test_most_expensive_ops_have_names_shapes_and_calls(tmp_path):
    @jax.jit
    def program(x):
        for _ in range(3):
            x = jnp.sin(x @ x)
        return x

    x = jnp.ones((300, 300))
    compiled = program.lower(x).compile().as_text()
    jax.block_until_ready(program(x))
    with profiling.trace(str(tmp_path)):
        for _ in range(4):
            jax.block_until_ready(program(x))
            jax.block_until_ready(x + 1)  # another program
    ops = profiling.most_expensive(str(tmp_path), compiled, steps=4, count=2)
    assert len(ops) == 2 and ops[0].milliseconds >= ops[1].milliseconds > 0
    for op in ops:
        assert op.calls == 1 and f"%{op.name} = " in compiled
        assert op.what.startswith("f32[300,300] ")


def test_describe_op_without_origin_gives_shape_and_kind():
    compiled = "HloModule m, x\n  ROOT %tuple.1 = (s32[], /*index=1*/f32[4,2]{1,0}) tuple(%a, %b)\n"
    assert profiling.describe("tuple.1", compiled) == "(s32[], f32[4,2]) tuple"
    assert profiling.describe("gone", compiled) == ""


def test_profiled_loop_is_told_by_what_it_runs(tmp_path):
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(x @ x), x))
    x = jnp.ones((300, 300))
    compiled = program.lower(x).compile().as_text()
    with profiling.trace(str(tmp_path)):
        jax.block_until_ready(program(x))
    ops = profiling.most_expensive(str(tmp_path), compiled, steps=1, count=None)
    assert "while(" in compiled and not any(" while" in op.what for op in ops)
    assert {op.calls for op in ops[:2]} == {5}
