"""Correct and faulty implementations of the linear recurrence, checked against the loop over tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab import testing
from attnlab.testing import check_recurrence
from tests.ops.cases import slow


def recurrence(
    q, k, v, g=None, beta=None, *, erase=None, scale=None, segment_ids=None, lengths=None, state=None, fault=""
):  # fmt: skip
    """(out, last state), token by token, with the named fault."""
    batch, length, heads, features = q.shape
    scale = features**-0.5 if scale is None or fault == "scale ignored" else scale
    decay = jnp.ones((batch, length, heads, 1)) if g is None else jnp.exp(g if g.ndim == 4 else g[..., None])
    if fault == "decay of the first feature":
        decay = decay[..., :1]
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    w = k if beta is None else beta[..., None] * k
    e, r = (w, k) if beta is not None else erase or (0 * k, 0 * k)
    w = k if fault == "key not scaled by beta" else w
    e = 0 * e if fault == "erase ignored" else e
    e = jax.lax.stop_gradient(e) if fault == "erase without gradient" else e
    starts = jnp.zeros((batch, length), bool)
    if segment_ids is not None and fault != "segments ignored":
        starts = starts.at[:, 1:].set(segment_ids[:, 1:] != segment_ids[:, :-1])
        starts = jnp.roll(starts, 1, axis=1) if fault == "segment one token late" else starts
    inside = jnp.ones((batch, length), bool)
    if lengths is not None and fault != "lengths ignored":
        inside = jnp.arange(length) < lengths[:, None]
    start = jnp.zeros((batch, heads, features, v.shape[-1])) if state is None or fault == "state ignored" else state

    def step(S, at):
        t, q, v, w, e, r, decay, starts, inside = at
        new = jnp.where(starts[:, None, None, None], 0, S)
        new = jnp.where((t % 32 == 0) & (t > 0), 0, new) if fault == "state lost between chunks" else new
        new = decay[..., None] * new if fault != "decay after the write" else new
        new = new - e[..., None] * jnp.einsum("bhk,bhkv->bhv", r, new)[..., None, :]
        before = new
        new = new + w[..., None] * v[:, :, None]
        new = decay[..., None] * new if fault == "decay after the write" else new
        new = jnp.where(inside[:, None, None, None], new, S)
        out = scale * jnp.einsum("bhk,bhkv->bhv", q, before if fault == "read before the write" else new)
        return new, jnp.where(inside[:, None, None], out, 0)

    arrays = (q, v, w, e, r, decay, starts, inside)
    last, out = jax.lax.scan(step, start, (jnp.arange(length), *(jnp.moveaxis(x, 1, 0) for x in arrays)))
    last = jax.lax.stop_gradient(last) if fault == "last state without gradient" else last
    return jnp.moveaxis(out, 0, 1), last


FAULTS = {
    "scale ignored": "scale",
    "decay of the first feature": "decay by feature",
    "key not scaled by beta": "beta",
    "erase ignored": "erase",
    "segments ignored": "segments",
    "segment one token late": "segments",
    "lengths ignored": "lengths",
    "state ignored": "state",
    "state lost between chunks": "plain",
    "decay after the write": "decay",
    "read before the write": "plain",
}


@pytest.mark.parametrize("fault, feature", FAULTS.items())
def test_planted_fault_of_a_recurrence_is_found(fault, feature):
    faulty = functools.partial(recurrence, fault=fault)
    row = check_recurrence(faulty, features=feature, cases=2, gradients=False)[feature]
    assert row.outcome == ("ignored" if fault.endswith("ignored") else "wrong"), row
    values = {}
    exec(row.code, values)
    out, _ = recurrence(**values["call"], fault=fault)
    assert abs(np.asarray(out) - testing.recurrence_answer(values["call"])["out"]).max() > 1e-3


@pytest.mark.parametrize(
    "fault, feature", [("erase without gradient", "erase"), ("last state without gradient", "beta")]
)
def test_missing_gradient_of_a_recurrence_is_found(fault, feature):
    row = check_recurrence(functools.partial(recurrence, fault=fault), features=feature, cases=1)[feature]
    assert row.outcome == "wrong" and "the gradient of " + ("erase[0]" if feature == "erase" else "beta") in row.why


def test_correct_recurrence_is_right_with_its_gradients():
    features = ["strong decay by feature", "erase", "segments", "lengths", "bfloat16"]
    report = check_recurrence(recurrence, features=features, cases=1)
    assert {row.outcome for row in report.rows} == {"right"} and report.ok, str(report)
    assert all(row.gradients for row in report.rows)


SIZES = [testing.RecurrenceShape(1, length, 1, features=64, values=128) for length in (65, 1)]


@pytest.mark.parametrize("features", [["resets"], slow("all")], ids=str)
def test_recurrence_with_gpu_kernel_sizes_and_type_is_right(features):
    function = functools.partial(attnlab.linear_recurrence, return_state=True, impl="parallel")
    report = check_recurrence(function, features=features, cases=1, shapes=SIZES, dtype=jnp.bfloat16)
    assert {row.outcome for row in report.rows} == {"right"}, str(report)
    assert all(row.gradients and row.cases == 2 for row in report.rows)


def test_report_code_reproduces_the_fault_with_its_sizes_and_type():
    faulty = functools.partial(recurrence, fault="state lost between chunks")
    report = check_recurrence(faulty, None, "plain", False, 1, shapes=SIZES, dtype=jnp.bfloat16)
    assert report["plain"].outcome == "wrong"
    values = {}
    exec(report["plain"].code, values)
    assert values["call"]["q"].dtype == jnp.bfloat16 and values["call"]["v"].shape == (1, 65, 1, 128)


def test_recurrence_without_an_argument_refuses():
    report = check_recurrence(lambda q, k, v: recurrence(q, k, v), features=["plain", "beta"], cases=2)
    assert [row.outcome for row in report.rows] == ["right", "refused"] and "beta" in report["beta"].why


@pytest.mark.parametrize("options", [{"cases": 0}, {"features": "flash"}])
def test_recurrence_options_without_a_check_are_errors(options):
    with pytest.raises(ValueError, match=r"cases = 0 of|feature 'flash' is unknown"):
        check_recurrence(recurrence, **options)
