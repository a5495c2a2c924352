"""Whether the operators of a model conform to the specification, in the type and with the features that it uses."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

import attnlab
from attnlab.nn import GPT
from attnlab.nn.kinds import KINDS, named, pattern_of
from attnlab.nn.resolved import resolved
from attnlab.testing import SHAPES, Row, check_attention, check_recurrence

# The features of `attnlab.testing.RECURRENCE_FEATURES` that a kind of layer is an instance of. GRU and convolutions are
# neither attention nor the recurrence: they have no specification here.
RECURRENCES = {
    "linear": ("plain", "state"),
    "retention": ("decay", "state"),
    "gla": ("decay by feature", "strong decay by feature", "state"),
    "mamba2": ("decay", "strong decay", "state"),
    "delta": ("beta", "state"),
    "gated_delta": ("beta and decay", "state"),
    "kda": ("beta and decay by feature", "state"),
    "delta_product": ("beta and decay", "state"),
    "rwkv7": ("erase", "decay by feature", "scale", "state"),
    "hgrn2": ("decay by feature", "strong decay by feature", "scale", "state"),
}
CASES = 2  # of a feature


def of_model(model: GPT) -> dict:
    """The certificate of a model's operators, as a comparison records it.

    Returns:
      conforms: whether all are right; None where none has a specification.
      worst: the largest error in units of its bound; None likewise.
      features: those that were checked, by kind of layer.
      wrong: what is not right, each a sentence.
    """
    features = {kind: features_of(model, kind) for kind in dict.fromkeys(pattern_of(model))}
    rows = {kind: _rows(model, kind, used) for kind, used in features.items() if used}
    wrong = [
        f"{kind}: {row.feature}: {row.why}"
        for kind, found in rows.items()
        for row in found
        if row.outcome not in ("right", "slow")
    ]
    return {
        "conforms": not wrong if rows else None,
        "worst": max((row.worst for found in rows.values() for row in found), default=None),
        "features": features,
        "wrong": wrong,
    }


def _rows(model: GPT, kind: str, features: tuple[str, ...]) -> tuple[Row, ...]:
    options = {"features": features, "cases": CASES * len(features)}
    if named(kind).operator == "attention":
        attention = functools.partial(attnlab.attention, impl=model.impl, return_lse=True)
        return check_attention(lambda **call: attention(**call), shapes=SHAPES[1:], **options).rows
    return check_recurrence(functools.partial(attnlab.linear_recurrence, return_state=True), **options).rows


def features_of(model: GPT, kind: str) -> tuple[str, ...]:
    """The features that a kind of layer of a model uses; none where it has no specification, as a user's part."""
    if kind not in KINDS:
        return ()
    found = named(kind)
    is_half = jnp.dtype(model.dtype) == jnp.bfloat16
    if found.operator != "attention":
        features = RECURRENCES.get(kind, ())
        return (*features, "bfloat16") if is_half and features else features
    uses: Mapping[str, bool] = {
        "window" if found.is_local(model) else "causal": True,
        "causal grouped heads": resolved(model).kv_heads != model.num_heads,
        "ALiBi": model.positions == "alibi",
        "causal soft cap": model.soft_cap is not None,
        "sinks": model.sinks,
        "scale": model.score_scale is not None,
        "forget gate": found.forget,
        "causal bfloat16": is_half,
    }
    return tuple(name for name, used in uses.items() if used)
