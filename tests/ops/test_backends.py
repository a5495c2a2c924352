"""All backends against the specification, feature by feature, with the public checks."""

import functools

import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from attnlab import attention, linear_recurrence
from attnlab.testing import FEATURES, RECURRENCE_FEATURES, SHAPES, Shape, check_attention, check_recurrence
from tests.ops.cases import slow


def by_tiles(q, **call):
    """Give short calls several ragged tiles; long calls, which measure memory, use the default tile sizes."""
    sizes = (8, 6) if q.shape[1] < 100 else None
    return attention(q, impl="blockwise", block_sizes=sizes, return_lse=True, **call)


@functools.cache
def of(impl):
    return lambda **call: attention(impl=impl, return_lse=impl != "splash", **call)


# Features that no other test of `attention` covers; the slow cases have all features.
WAYS = ["forget gate", "causal bfloat16", "without jit"]
OF_DECODING = ["plain", "scale", "padding", "blocks", "mask", "masked rows", "bias", "soft cap", "sinks", "remat"]
OF_DECODING += ["large scores", "grouped heads", "NaN behind the mask", "lse", "shifted rows", "bfloat16", "vmap"]
STEP, KERNEL = Shape(2, 3, 40, 4, 2, 8), Shape(2, 256, 256, 4, 2, 128)


@pytest.mark.parametrize(
    "function, features, shape",
    [
        pytest.param(by_tiles, WAYS, SHAPES[1], id="blockwise, some"),
        pytest.param(of("decode"), ["mask", "NaN behind the mask"], STEP, id="decode, some"),
        pytest.param(of("dense"), list(FEATURES), SHAPES[1], id="dense", marks=pytest.mark.slow),
        pytest.param(by_tiles, list(FEATURES), SHAPES[1], id="blockwise", marks=pytest.mark.slow),
        pytest.param(of("decode"), OF_DECODING, STEP, id="decode", marks=pytest.mark.slow),
        pytest.param(of("splash"), ["window", "sinks", "bfloat16"], KERNEL, id="splash", marks=pytest.mark.slow),
    ],
)
def test_backend_matches_specification_in_its_features(function, features, shape, monkeypatch):
    interpreted = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", interpreted)
    report = check_attention(function, features=features, shapes=[shape], cases=len(features))
    assert [row.feature for row in report.rows if row.outcome != "right"] == [], str(report)


@pytest.mark.parametrize(
    "impl, features",
    [
        ("chunked", ["bfloat16"]),
        ("recurrent", ["lengths"]),
        ("parallel", ["bfloat16", "fast decay"]),
        slow("chunked", list(RECURRENCE_FEATURES)),
        slow("recurrent", list(RECURRENCE_FEATURES)),
        slow("parallel", list(RECURRENCE_FEATURES)),
    ],
    ids=["chunked, one", "recurrent, one", "parallel, some", "chunked", "recurrent", "parallel"],
)
def test_recurrence_form_matches_specification_in_its_features(impl, features):
    function = functools.partial(linear_recurrence, impl=impl, return_state=True)
    report = check_recurrence(function, features=features, cases=len(features))
    assert [row.feature for row in report.rows if row.outcome != "right"] == [], str(report)
