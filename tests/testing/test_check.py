"""Correct and faulty implementations of attention, checked against the specification."""

import jax
import numpy as np
import pytest

import attnlab
from attnlab import testing
from attnlab.testing import check_attention
from attnlab.testing.peers import PEERS
from tests.ops.cases import slow
from tests.testing import faults

SMALL = testing.SHAPES[:1]


NAMED = {
    "window one key too wide": "it computes a window one key larger",
    "queries counted from 0": "it computes queries counted from 0",
    "grouped heads in turn": "it computes key heads tiled, not repeated",
    "gradient of k off by 1 %": "the gradient of k has an error of",
    "zeros": "out has an error of",
    "bias without gradient": "the gradient of bias has an error of",
    "gates without gradient": "the gradient of score_mods has an error of",
    "one draw for all keys": "it drops the same weights for different random keys",
}
# Faults like another one that always runs.
SLOW = {"layout swapped", "segments ignored", "bias dropped", "bias of the first head", "no shift"}
SLOW |= {"output in bfloat16", "softmax in bfloat16", "scores in the input type"}


@pytest.mark.parametrize(
    "fault, feature", [slow(*fault) if fault[0] in SLOW else fault for fault in faults.FAULTS.items()]
)
def test_planted_fault_is_found(fault, feature):
    options = {"gradients": "gradient" in fault, "cases": 2}
    is_large = fault in ("accumulator not rescaled", "window of four keys at most")
    options["shapes"] = testing.SHAPES if is_large else SMALL
    row = check_attention(faults.with_fault(fault), features=[feature], **options)[feature]
    is_left_out = fault.endswith(("ignored", "dropped")) or fault == "no scale"
    assert row.outcome == ("ignored" if is_left_out else "wrong") and row.worst > 1
    assert NAMED.get(fault, "") in row.why and row.why
    assert "call" in row.code


def test_report_code_reproduces_the_fault_in_a_small_call(capsys):
    function = faults.with_fault("gradient of k off by 1 %")
    (row,) = check_attention(function, features=["window"], cases=1, shapes=SMALL).rows
    values = {"function": function}
    exec(row.code, values)
    _, expected, ratio = values["results"]["the gradient of k"]
    np.testing.assert_allclose(ratio[expected != 0], 1.01, rtol=1e-4)
    assert "import as_attnlab as adapter" in row.code and "ratio" in capsys.readouterr().out
    assert values["call"].q.size < 100


def test_report_explains_a_shared_fault_once_and_is_text():
    function, features = faults.with_fault("gradient of k off by 1 %"), ["plain", "causal", "bfloat16"]
    report = check_attention(function, features=features, cases=1, shapes=SMALL)
    plain, causal, half, *_, last = report.splitlines()  # as pytest prints it after `assert report.ok, report`
    assert plain.endswith("times its bound (found/expected 1.01)") and repr(report) == str(report)
    assert causal.endswith("like plain: the gradient of k")
    assert half.endswith("errors up to 9% of the largest value are within its bound")  # (8 + √13) 2⁻⁷
    assert last == "3 features: 1 right, 2 wrong; 1 fault" and not report.ok


def test_correct_implementation_is_right_and_its_choices_are_reported():
    features = ["causal", "masked rows", "large scores", "dropout", "causal bfloat16", "vmap", "remat", "sharded"]
    report = check_attention(faults.with_fault(""), features=features, cases=1, shapes=SMALL)
    outcomes = {row.feature: row.outcome for row in report.rows}
    assert outcomes.pop("sharded") in ("right", "refused")
    assert set(outcomes.values()) == {"right"} and report.ok
    meanings = {
        "a fully masked row returns": "0",
        "causal with fewer queries than keys": "the first query attends to the first key",
    }
    assert report.meanings == meanings | {"the lse of bfloat16 is in": "float32"}
    assert report.follows == ["torch", "ONNX"] and str(report).endswith("\nas torch, ONNX\n8 features: 8 right")


def test_tf32_products_have_the_bound_of_tf32_and_are_reported(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    bound = "its products are in TF32: errors up to 1% of the largest value are within its bound"  # (8 + √13) 2⁻¹⁰
    for precision, why in (("highest", ""), (None, bound)):
        with jax.default_matmul_precision(precision):
            row = check_attention(faults.with_fault(""), features=["causal"], cases=1, shapes=SMALL)["causal"]
        assert (row.outcome, row.why) == ("right", why)


def test_function_without_an_argument_refuses_with_its_message():
    report = check_attention(
        lambda q, k, v: attnlab.attention(q, k, v), features=["plain", "causal"], cases=2, shapes=SMALL
    )
    assert (report["plain"].outcome, report["causal"].outcome) == ("right", "refused")
    assert "mask" in report["causal"].why and report.ok


def test_adapter_that_reads_the_values_of_slopes_is_checked():
    def adapter(call):
        return testing.as_attnlab(call) | {"score_mod": attnlab.score_mods.ALiBi(np.asarray(call.score_mods[0].slopes))}

    assert check_attention(attnlab.attention, adapter, ["ALiBi"], cases=1, shapes=SMALL)["ALiBi"].outcome == "right"


def test_adapter_that_cannot_express_a_call_refuses():
    def adapter(call):
        if call.sinks is not None:
            raise testing.Unsupported("it has no sinks")
        return testing.as_attnlab(call)

    row = check_attention(attnlab.attention, adapter, ["sinks"], cases=1, shapes=SMALL)["sinks"]
    assert (row.outcome, row.why, row.cases) == ("refused", "it has no sinks", 0)


def test_feature_with_growing_memory_is_slow():
    def attention(q, k, v, mask=None):
        return attnlab.attention(q, k, v, mask, impl="blockwise" if mask is None else "dense")

    report = check_attention(attention, features=["causal"], cases=1, shapes=SMALL, gradients=False)
    assert report["causal"].outcome == "slow"


def test_missing_gradients_are_reported_and_outputs_are_compared():
    def attention(q, k, v):
        shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
        return jax.pure_callback(lambda *x: np.asarray(attnlab.attention(*x)), shape, q, k, v)

    row = check_attention(attention, features=["plain"], cases=1, shapes=SMALL)["plain"]
    assert (row.outcome, row.gradients) == ("right", False)


@pytest.mark.parametrize(
    "name", [slow(name) if "linen" in name else name for name in PEERS if name.startswith(("jax.nn", "flax"))]
)
def test_peers_are_called_by_their_own_arguments(name):
    peer, options = PEERS[name], {"gradients": False, "cases": 4, "shapes": SMALL}
    report = check_attention(peer.load(), peer.adapter, ["causal", "masked rows", "bias", "sinks"], **options)
    assert [row.outcome for row in report.rows] == ["right", "right", "right", "refused"], str(report)
    assert report.meanings["a fully masked row returns"] == "the mean of all values"


def test_unknown_value_of_fully_masked_rows_is_another_value():
    def attention(**call):
        out, lse = attnlab.attention(**call, return_lse=True)
        return jax.numpy.where(jax.numpy.isneginf(lse)[..., None], 0.5, out)

    report = check_attention(attention, features=["masked rows"], gradients=False, cases=2, shapes=SMALL)
    assert report.meanings["a fully masked row returns"] == "another value"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cases": 0}, "cases = 0 of .* features: expected 1 or more"),
        ({"features": ["flash"]}, "feature 'flash' is unknown: use one of"),
    ],
)
def test_options_without_a_check_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        check_attention(attnlab.attention, **options)


def test_unknown_causal_alignment_is_wrong_with_fewer_queries():
    def attention(q, k, v, mask=None):
        return attnlab.attention(q, k, v, None if q.shape[1] != k.shape[1] else mask)

    report = check_attention(attention, features=["causal"], cases=1, shapes=SMALL)
    assert [(row.feature, row.outcome) for row in report.rows] == [
        ("causal", "right"),
        ("causal with fewer queries than keys", "wrong"),
    ]
    assert not report.ok


@pytest.mark.parametrize(
    "function, outcome, why",
    [
        (lambda q, k, v: [q], "wrong", "it returned a list, expected an output array, or (output, lse)"),
        (lambda q, k, v: (q, k, v), "wrong", "it returned a tuple of 3"),
        (lambda q, k, v: q.swapaxes(1, 2), "wrong", "out has shape (1, 1, 2, 1), expected (1, 2, 1, 1)"),
        (lambda q, k, v: (q, q[..., 0].swapaxes(1, 2)), "wrong", "lse has shape (1, 1, 2), expected (1, 2, 1)"),
        (lambda a, b, c: a, "refused", "unexpected keyword argument 'q'"),
        (lambda q, k, v: absent, "wrong", "NameError: name 'absent' is not defined (test_check.py:"),  # noqa: F821
    ],
)
def test_unexpected_results_and_errors_are_reported(function, outcome, why):
    report = check_attention(function, features=["plain"], cases=1, shapes=SMALL)
    row = report["plain"]
    assert (row.outcome, report.ok) == (outcome, False) and why in row.why


@pytest.mark.parametrize(
    "error, backward, outcome",
    [
        (ValueError, False, "wrong"),
        (NotImplementedError, False, "refused"),
        (ValueError, True, "wrong"),
        (NotImplementedError, True, "right"),
    ],
)
def test_argument_error_after_a_computed_call_is_wrong(error, backward, outcome):
    def refuse_odd(x):
        if x.shape[1] % 2:
            raise error("an odd length")
        return x

    @jax.custom_jvp
    def checked(x):
        return x if backward else refuse_odd(x)

    checked.defjvp(lambda primals, tangents: (primals[0], refuse_odd(tangents[0])))

    def attention(q, k, v):
        return attnlab.attention(checked(q), k, v)

    shapes = [testing.Shape(q_length=n, kv_length=n) for n in (4, 5)]
    row = check_attention(attention, features=["plain"], cases=2, shapes=shapes)["plain"]
    assert row.outcome == outcome and ("an odd length" in row.why or outcome == "right")


def test_output_of_an_earlier_call_is_wrong():
    cache = {}

    def attention(q, k, v):
        def first(*arrays):
            call = testing.AttentionCall(*map(np.asarray, arrays))
            return cache.setdefault(arrays[0].shape, testing.answer(call).out.astype(np.float32))

        return jax.pure_callback(first, jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v)

    row = check_attention(attention, features=["plain"], cases=2, shapes=SMALL, gradients=False)["plain"]
    assert (row.outcome, row.cases) == ("wrong", 2)


def test_mistakes_in_the_check_itself_are_errors(own_errors):
    with pytest.raises(ValueError, match="the adapter returned a list, expected a dictionary"):
        check_attention(attnlab.attention, lambda call: [call.q], features=["plain"], cases=1)
    with pytest.raises(ValueError, match="function is 3: expected a function of attention"):
        check_attention(3)
    with pytest.raises(KeyError, match="'sinks' was not checked, only plain"):
        check_attention(attnlab.attention, features=["plain"], cases=1, shapes=SMALL)["sinks"]
