"""Runs of the studies: small ones are repeatable, and those of --fast show what they can at that size."""

import pytest

from attnlab.study import registry
from attnlab.study.report import Options

TEXTS = {
    "pruning": "the cat that sat on the mat saw a rat, and the rat that sat on the hat saw the cat. " * 60,
    "roles": ("x" * 64 + ' he said "well" and the cat is new, a new cat is "old", says the dog ' * 3) * 100,
}


def copying(study, positions):
    return {"FAST": study.Size(("copy",), positions, 2, 2, 2, vocab_size=6, batch_size=2, examples=64), "LAYERS": 1}


SMALL = {  # by study: names that make it small
    "copying": lambda study: copying(study, ("learned", "none")),
    "dispersion": lambda study: {"FAST": study.Size(2, 10, 16), "LENGTHS": (16, 64)},
    "gradient_step": lambda study: {"FAST": study.Size(2, 20), "BATCH": 8, "EVALUATED": 200},
    "grokking": lambda study: {"FAST": study.Size(2, 10)},
    "induction": lambda study: {"FAST": study.Size(seeds=2, steps=4, looks=2, batch_size=4, examples=16)},
    "markov": lambda study: {"FAST": study.Size(seeds=2, steps=10), "LENGTH": 10, "BATCH": 2, "HELD_OUT": 4},
    "overwriting": lambda study: {"FAST": study.Size(seeds=2, steps=2, rewrites=(0, 2), examples=8)},
    "pruning": lambda study: {"FAST": study.Size(seeds=2, steps=3, windows=2, held_out=2)},
    "rank": lambda study: {"FAST": study.Size(2)},
    "recall": lambda study: {
        "FAST": study.Size(2, 2, widths=(4,), widths_of_others=(4,), batch_size=2, examples=32),
        "MIXERS": {name: study.MIXERS[name] for name in (study.SOFTMAX, study.LINEAR)},
    },
    "roles": lambda study: {"FAST": study.Size(seeds=2, steps=2, pairs=30, windows=4)},
    "sinks": lambda study: {
        "FAST": study.Size(seeds=2, steps=4, looks=2),
        "LENGTH": 16,
        "BATCH": 2,
        "HELD_OUT": 4,
        "WIDTH": 8,
    },
    "state_tracking": lambda study: {"FAST": study.Size(seeds=2, steps=2, batch_size=2, examples=8)},
}
ONE = {  # of these studies one condition is measured again, since compiling takes long
    "copying": lambda study: copying(study, ("none",)),
    "gradient_step": lambda study: {"LAYERS": {study.LINEAR: study.LAYERS[study.LINEAR]}},
    "grokking": lambda study: {"KINDS": {study.DECAY_FAST: study.KINDS[study.DECAY_FAST]}},
    "induction": lambda study: {"WIDTHS": {study.ONE: study.WIDTHS[study.ONE]}},
    "markov": lambda study: {"CONDITIONS": (study.ONE,)},
    "overwriting": lambda study: {"MIXERS": {study.DELTA: study.MIXERS[study.DELTA]}},
    "recall": lambda study: {"MIXERS": {study.LINEAR: study.MIXERS[study.LINEAR]}},
    "sinks": lambda study: {"CONDITIONS": (study.SINK,)},
    "state_tracking": lambda study: {"MIXERS": {study.NEGATIVE: study.MIXERS[study.NEGATIVE]}},
}
QUICK = ("copying", "gradient_step", "rank")  # of the others, a run takes minutes


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.campaign) for name in SMALL]
)
def test_small_run_is_judged_drawn_and_repeatable(name, monkeypatch, tmp_path, run_fast, small_quickstart):
    def change(names):
        for key, value in names.items():
            monkeypatch.setattr(study, key, value)

    study, path = registry.load(name), ""
    if name in TEXTS:
        path = str(tmp_path / "text.txt")
        (tmp_path / "text.txt").write_text(TEXTS[name], encoding="utf-8")
    change(SMALL[name](study))
    rows = run_fast(study, path)
    change(ONE[name](study) if name in ONE else {})
    again = study.measure(Options(fast=True, path=path))
    assert again == [row for row in rows if row in again]
    assert 0 < len(again) < len(rows) if name in ONE else len(again) == len(rows)


HELD = {  # by study: the parts of its claim that hold with --fast; others need the full study
    "copying": (),
    "dispersion": range(4),
    "gradient_step": range(4),
    "grokking": range(4),
    "induction": range(7),
    "markov": (0, 3),
    "overwriting": range(3),
    "pruning": (),
    "rank": range(6),
    "recall": range(5),
    "roles": (),
    "sinks": range(4),
    "state_tracking": range(3),
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", HELD)
def test_fast_run_shows_what_it_can_at_its_size(name, run_fast):
    study = registry.load(name)
    verdict = study.judge(run_fast(study))
    assert all(verdict.parts[part][0] for part in HELD[name]), str(verdict)
