"""A text that several tests train on, and the file of a study."""

TEXT = "En un lugar de la Mancha, de cuyo nombre no quiero acordarme, no ha mucho tiempo que vivía un hidalgo. " * 60
STUDY = '''"""Squares are larger than their roots.

For whole numbers from 2.
"""

import time
from attnlab import plots
from attnlab.study.report import Verdict


def measure(options):
    advance = options.progress(2)
    rows = [{"seed": seed, "square": (seed + 2) ** 2} for seed in (0, 1)]
    advance(2)
    return rows


def judge(rows):
    return Verdict.of((all(row["square"] > row["seed"] + 2 for row in rows), "all are <larger>"))


def draw(rows):
    return plots.lines({"square": ([0, 1], [row["square"] for row in rows])}, "Larger", x="seed", y="square")
'''
