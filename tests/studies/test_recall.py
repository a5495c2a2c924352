"""The study of associative recall: its mixer, its verdict, and a run."""

import jax
import numpy as np

from attnlab._studies import recall
from attnlab._studies.recall import CONVOLUTION, LINEAR, MIXERS, RECURRENT, SOFTMAX
from tests.studies import claims

SOLVED = {SOFTMAX: {4: 16, 8: 16, 16: 16}, LINEAR: {4: 32, 8: 32, 16: 64}, RECURRENT: {}, CONVOLUTION: {4: 64}}


def rows(solved=SOLVED):
    """Two seeds of each mixer that recall from the given width on, and below it the less the more pairs there are."""
    return [
        {
            "mixer": mixer,
            "width": width,
            "seed": seed,
            "pairs": pairs,
            "recalled": 0.95 if width >= solved[mixer].get(pairs, 1000) else 1 / pairs + 0.01 * seed,
        }
        for mixer in MIXERS
        for width in (16, 32, 64)
        for seed in (0, 1)
        for pairs in (4, 8, 16)
    ]


def test_recall_claim():
    solved = {
        "softmax needs to grow": (0, {SOFTMAX: {4: 16, 8: 16, 16: 32}}),
        "linear does not grow": (1, {LINEAR: {4: 32, 8: 32, 16: 32}}),
        "GRU recalls all": (3, {RECURRENT: {4: 16, 8: 16, 16: 16}}),
        "convolution recalls all": (4, {CONVOLUTION: {4: 16, 8: 16, 16: 16}}),
    }
    refuted = {name: (part, rows(SOLVED | others)) for name, (part, others) in solved.items()}
    same = [row | {"recalled": 0.5} if row["mixer"] == LINEAR and row["width"] == 16 else row for row in rows()]
    narrow = rows(SOLVED | {SOFTMAX: {4: 32, 8: 32, 16: 32}})
    narrow = [row for row in narrow if row["mixer"] != RECURRENT or row["width"] == 16]
    refuted |= {"more pairs are no harder": (2, same), "GRU measured at smaller widths alone": (3, narrow)}
    claims.check(recall, rows(), refuted, "The more pairs")


def test_recall_gated_convolution_equals_formula(float64):
    x = np.random.default_rng(0).standard_normal((2, 7, 4))
    out, variables = jax.jit(recall.GatedConv().init_with_output)(jax.random.key(0), x)
    params = jax.tree.map(np.asarray, variables["params"])
    convolved = np.zeros_like(x)
    for i in range(7):
        for j in range(i + 1):
            convolved[:, i] += params["kernel"][i - j] * x[:, j]
    gated = convolved * (x @ params["gate"]["kernel"] + params["gate"]["bias"])
    np.testing.assert_allclose(out, gated @ params["out"]["kernel"] + params["out"]["bias"], rtol=1e-10)
