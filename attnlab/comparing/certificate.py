"""Check a model's operators against the specification, in the dtype and with the features that the model uses."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

import attnlab
from attnlab.nn import GPT
from attnlab.nn.custom import is_custom
from attnlab.nn.layer import LayerConfig
from attnlab.nn.multihead import MultiHeadAttention
from attnlab.testing import SHAPES, Row, check_attention, check_recurrence

# The features of `attnlab.testing.RECURRENCE_FEATURES` that each kind of layer uses. GRU and convolutions use neither
# attention nor the linear recurrence, so they have no specification here.
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
CASES = 2  # per feature


def certify(model: GPT) -> dict:
    """Check a model's operators, and return the results as a comparison records them.

    Returns:
      conforms: whether all operators are right; None if no operator has a specification.
      worst: the largest error in units of its bound; None if no operator has a specification.
      features: names of the checked features, by kind of layer; a second layer of one kind is "KIND 2".
      wrong: a sentence for each failed check.
    """
    layers = {}
    for layer in model.config.used:  # several may have the same kind
        number = sum(other.kind == layer.kind for other in layers.values())
        layers[f"{layer.kind} {number + 1}" if number else layer.kind] = layer
    features = {name: features_of(model, layer) for name, layer in layers.items()}
    rows = {name: _rows(layer, features[name]) for name, layer in layers.items() if features[name]}
    wrong = [
        f"{name}: {row.feature}: {row.why}"
        for name, layer_rows in rows.items()
        for row in layer_rows
        if row.outcome not in ("right", "slow")
    ]
    return {
        "conforms": False if wrong else True if rows and len(rows) == len(layers) else None,
        "worst": max((row.worst for layer_rows in rows.values() for row in layer_rows), default=None),
        "features": features,
        "wrong": wrong,
    }


def _rows(layer: LayerConfig, features: tuple[str, ...]) -> tuple[Row, ...]:
    options = {"features": features, "cases": CASES * len(features)}
    if layer.module.operator == "attention":
        attention = functools.partial(attnlab.attention, impl=layer.impl, return_lse=True)
        return check_attention(lambda **call: attention(**call), shapes=SHAPES[1:], **options).rows
    return check_recurrence(functools.partial(attnlab.linear_recurrence, return_state=True), **options).rows


def features_of(model: GPT, config: LayerConfig) -> tuple[str, ...]:
    """Return the features that a layer uses; none if it has no specification, as for user-defined code."""
    if is_custom(config.kind) or getattr(config, "score_mod", None) is not None:
        return ()
    layer, is_half = config.make(model.config), jnp.dtype(model.dtype) == jnp.bfloat16
    if layer.operator != "attention":
        features = RECURRENCES.get(config.kind, ())
        return (*features, "bfloat16") if is_half and features else features
    uses: Mapping[str, bool] = {
        "window" if config.window is not None else "causal": True,
        "mask": config.mask is not None,
        "causal grouped heads": isinstance(layer, MultiHeadAttention) and layer.kv_heads != layer.num_heads,
        "ALiBi": model.config.position_encoding == "alibi",
        "causal soft cap": config.soft_cap is not None,
        "sinks": isinstance(layer, MultiHeadAttention) and layer.sinks,
        "scale": config.scale is not None,
        "forget gate": isinstance(layer, MultiHeadAttention) and layer.forget_gate,
        "causal bfloat16": is_half,
    }
    return tuple(name for name, used in uses.items() if used)
