"""The study of what heads link."""

import matplotlib as mpl
import numpy as np
import pytest

from attnlab._studies import roles
from attnlab.study.report import Options
from attnlab.support.errors import UserError

TEXT = "x" * 64 + ' he said "well" and the cat is new, a new cat is "old", says the dog ' * 3
ROLES = tuple(roles.PATTERNS["en"])


def test_role_pairs_have_the_earlier_part_as_key():
    (first, *_) = roles.find(TEXT, roles.PATTERNS["en"]["adjective → noun"])
    assert TEXT[first.key : first.key_end] == "new" and TEXT[first.query : first.query_end] == "cat"


def test_role_controls_match_distances_and_are_not_pairs():
    pairs = roles.find(TEXT, roles.PATTERNS["en"]["adjective → noun"])
    others = roles.controls(TEXT, pairs, {pair.query for pair in pairs}, np.random.default_rng(0))
    assert others and not {o.query for o in others} & {p.query for p in pairs}
    for other in others:
        words = TEXT[other.key : other.key_end], TEXT[other.query : other.query_end]
        assert all(len(word) == 3 and word.isalpha() for word in words)
        assert not TEXT[other.query_end].isalpha() and not TEXT[other.key - 1].isalpha()


def made(role="", seed=None, **changed):
    """Rows of two seeds with a head for each role; `changed` of the best head of a role, in one seed if given."""
    rows = []
    for number in range(2):
        for place, name in enumerate(ROLES):
            for layer, head in np.ndindex(2, 2):
                best = 2 * layer + head == place
                row = {"seed": number, "role": name, "layer": layer, "head": head, "lift": 3.0 if best else 1.0}
                row |= {"weight": 0.3 if best else 0.1, "control": 0.1, "pairs": 200, "p": 1e-5 if best else 1.0}
                row |= {"loss": 1.3, "previous": 0.1, "kind": ""}
                rows.append(row | (changed if best and name == role and seed in (None, number) else {}))
    return rows


def test_judge_of_a_head_for_each_role_holds():
    assert roles.judge(made()).held


@pytest.mark.parametrize("place", range(3), ids=ROLES)
@pytest.mark.parametrize("changed", [{"lift": 1.9}, {"p": 0.02}], ids=["lift", "p"])
def test_role_without_a_head_in_one_seed_fails(place, changed):
    verdict = roles.judge(made(ROLES[place], 1, **changed))
    assert [held for held, _ in verdict.parts] == [at != place for at in range(4)]
    assert "found in 1 of 2 seeds" in verdict.parts[place][1]


def test_head_for_the_previous_character_fails_the_last_part():
    verdict = roles.judge(made(ROLES[1], kind="previous", previous=0.9))
    assert [held for held, _ in verdict.parts] == [True, True, True, False]
    assert f"{ROLES[1]} 2 previous (0.90" in verdict.parts[3][1]


def test_role_without_pairs_fails():
    verdict = roles.judge([row for row in made() if row["role"] != ROLES[2]])
    assert "not measured" in verdict.parts[2][1] and not verdict.parts[2][0]


def test_draw_ranks_heads_for_each_role():
    with mpl.rc_context({"backend": "agg"}):
        left, right = roles.draw(made()).axes
    assert [line.get_ydata().tolist() for line in left.lines] == [[3, 1, 1, 1]] * 3
    assert "rank" in left.get_xlabel() and "previous" in right.get_ylabel()


def test_text_without_pairs_is_one_line(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("nothing to find here, " * 40, encoding="utf-8")
    with pytest.raises(UserError, match="fewer than 30 pairs"):
        roles.measure(Options(fast=True, path=str(path)))


@pytest.mark.campaign
def test_small_study_runs_to_the_end_twice_alike(monkeypatch, tmp_path, run_fast, small_quickstart):
    monkeypatch.setattr(roles, "FAST", roles.Size(seeds=2, steps=2, pairs=30, windows=4))
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 100, encoding="utf-8")
    assert run_fast(roles, str(path)) == roles.measure(Options(fast=True, path=str(path)))


@pytest.mark.campaign
def test_fast_study_scores_every_head():
    """Two short runs need not have heads for the roles; each head is scored, and the models have learned."""
    rows = roles.measure(Options(fast=True))
    assert len(rows) == 2 * len(ROLES) * roles.LAYERS * roles.HEADS
    assert max(row["loss"] for row in rows) < 2.2, "nats per character; the letters' frequencies alone give 3"
    assert all(0 <= row["p"] <= 1 and row["lift"] >= 0 for row in rows)
