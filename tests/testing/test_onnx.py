"""Published ONNX test vectors for Attention and LinearAttention (its backend tests, Apache-2.0), as data."""

import importlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import attnlab
from attnlab.masks import Causal, Dense, Padding, SlidingWindow
from attnlab.score_mods import ScoreFn, SoftCap

pytest.importorskip("onnx", reason="onnx is not installed: make peers")
pytestmark = pytest.mark.slow


def vectors(module: str) -> list:
    """(name, attributes, inputs by name, outputs by name) of each vector that onnx makes."""
    definitions = importlib.import_module(f"onnx.backend.test.case.node.{module}")
    helper = importlib.import_module("onnx.helper")
    cases = []

    def expect(node, inputs, outputs, name, **_):
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        sides = ((node.input, inputs), (node.output, outputs))
        named = [dict(zip((name for name in names if name), map(np.asarray, arrays))) for names, arrays in sides]
        cases.append(pytest.param(attributes, *named, id=name.removeprefix("test_")))

    original, definitions.expect = definitions.expect, expect
    try:
        for case in vars(definitions).values():
            if isinstance(case, type) and case.__module__ == definitions.__name__:
                for name in dir(case):
                    if name.startswith("export"):
                        getattr(case, name)()
    finally:
        definitions.expect = original
    return cases


def by_head(x: np.ndarray, heads: int) -> np.ndarray:
    """`[B, T, H·D]` or `[B, H, T, D]` as `[B, T, H, D]`."""
    return x.reshape(*x.shape[:2], heads, -1) if x.ndim == 3 else np.swapaxes(x, 1, 2)


def assert_near(actual, expected):
    """Within 16 roundings of the largest element: sums of products in another order."""
    precision = float(ml_dtypes.finfo(expected.dtype).eps)
    expected = expected.astype(np.float64)
    atol = 16 * precision * max(abs(expected).max(), 1e-3)
    np.testing.assert_allclose(np.asarray(actual).astype(np.float64), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("attributes, inputs, outputs", vectors("attention"))
def test_attention_gives_the_published_results(attributes, inputs, outputs):
    q, k, v = (
        by_head(inputs[name], attributes.get(f"{side}_num_heads", 1))
        for name, side in (("Q", "q"), ("K", "kv"), ("V", "kv"))
    )
    start = 0
    if "past_key" in inputs:
        k, v = (
            np.concatenate([np.swapaxes(inputs[f"past_{x}"], 1, 2), new], 1) for x, new in (("key", k), ("value", v))
        )
        start = inputs["past_key"].shape[2]
    (batch, q_length, heads), kv_length = q.shape[:3], k.shape[1]
    mask, cap, lengths = None, attributes.get("softcap", 0), inputs.get("nonpad_kv_seqlen")
    # Queries are the last of a cache with lengths, or follow past keys; otherwise they start at 0.
    starts = np.full(batch, start) if lengths is None else lengths - q_length
    positions = {"q_positions": starts[:, None] + np.arange(q_length), "kv_positions": np.arange(kv_length)}
    parts = [] if lengths is None else [Padding(lengths.astype(np.int32))]
    parts += [Causal()] * attributes.get("is_causal", 0)
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if max(left, right) >= 0:
        parts.append(SlidingWindow(*(kv_length if size < 0 else size for size in (left, right))))
    bias = inputs.get("attn_mask")
    if bias is not None:
        missing = kv_length - bias.shape[-1] if bias.shape[-1] > 1 else 0
        value = False if bias.dtype == bool else -np.inf
        bias = np.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, missing)], constant_values=value)
        bias = np.broadcast_to(bias, (batch, heads, q_length, kv_length))
        if bias.dtype == bool:
            parts.append(Dense(bias))
            bias = None
    for part in parts:
        mask = part if mask is None else mask & part
    mods = (SoftCap(cap),) if cap else ()
    if cap and bias is not None:  # ONNX adds the bias after the cap
        arrays = jnp.asarray(bias, jnp.float32), jnp.asarray(starts, jnp.int32)
        mods += (ScoreFn(lambda s, b, h, i, j, x, starts: s + x[b, h, i - starts[b], j], *arrays),)
        bias = None
    scale = attributes.get("scale")
    positions = {name: jnp.asarray(x, jnp.int32) for name, x in positions.items()}
    out = attnlab.attention(q, k, v, mask, mods or None, bias, scale, **positions)
    assert_near(out, by_head(outputs["Y"], heads))


@pytest.mark.parametrize("attributes, inputs, outputs", vectors("linear_attention"))
def test_recurrence_gives_the_published_results(attributes, inputs, outputs):
    queries, states = attributes["q_num_heads"], attributes["kv_num_heads"]
    q, k, v = (by_head(inputs[name], heads) for name, heads in (("query", queries), ("key", states), ("value", states)))
    g, beta, state = (inputs.get(name) for name in ("decay", "beta", "past_state"))
    if g is not None and g.shape[-1] > states:
        g = by_head(g, states)
    if beta is not None:
        beta = np.broadcast_to(beta, (*beta.shape[:2], states))
    g, beta, state = (None if x is None else x.astype(np.float32) for x in (g, beta, state))
    scale = attributes.get("scale", 0) or None
    out, last = attnlab.linear_recurrence(q, k, v, g, beta, scale=scale, state=state, return_state=True)
    assert_near(out, by_head(outputs["output"], queries))
    assert_near(last, outputs["present_state"])
