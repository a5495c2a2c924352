"""The study of what heads link."""

import numpy as np
import pytest

from attnlab._studies import roles
from attnlab.study.report import Options
from attnlab.support.errors import UserError
from tests.studies import claims

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


def test_roles_claim():
    refuted = {
        f"{role}, {changed}": (place, made(role, 1, **changed))
        for place, role in enumerate(ROLES)
        for changed in ({"lift": 1.9}, {"p": 0.02})
    }
    refuted["previous"] = (3, made(ROLES[1], kind="previous", previous=0.9))
    claims.check(roles, made(), refuted, "Each role has a head")
    assert "found in 1 of 2 seeds" in roles.judge(made(ROLES[0], 1, p=0.02)).parts[0][1]
    assert f"{ROLES[1]} 2 previous (0.90" in roles.judge(refuted["previous"][1]).parts[3][1]


def test_role_without_pairs_fails():
    verdict = roles.judge([row for row in made() if row["role"] != ROLES[2]])
    assert "not measured" in verdict.parts[2][1] and not verdict.parts[2][0]


def test_text_without_pairs_is_one_line(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("nothing to find here, " * 40, encoding="utf-8")
    with pytest.raises(UserError, match="fewer than 30 pairs"):
        roles.measure(Options(fast=True, path=str(path)))
