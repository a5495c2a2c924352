"""The study of overwritten keys."""

from attnlab._studies import overwriting
from attnlab._studies.overwriting import DELTA, LINEAR, MIXERS
from tests.studies import claims

SOLVED = {LINEAR: {0: 0.98, 8: 0.4}, DELTA: {0: 0.98, 8: 0.97}}


def rows(solved=SOLVED):
    return [
        {"mixer": mixer, "rewrites": rewrites, "seed": seed, "recalled": solved[mixer][rewrites] + 0.002 * seed}
        for mixer in MIXERS
        for rewrites in (0, 8)
        for seed in range(3)
    ]


def test_overwriting_claim():
    changes = {
        "control": (0, {DELTA: {0: 0.5, 8: 0.97}}),
        DELTA: (1, {DELTA: {0: 0.98, 8: 0.85}}),
        LINEAR: (2, {LINEAR: {0: 0.98, 8: 0.9}}),
    }
    refuted = {name: (part, rows(SOLVED | solved)) for name, (part, solved) in changes.items()}
    claims.check(overwriting, rows(), refuted, "delta rule")
