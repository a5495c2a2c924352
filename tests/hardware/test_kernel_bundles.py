"""Bundles of splash attention, compiled for v5e."""

import json

import pytest

from attnlab.bench import main


@pytest.fixture(scope="module")
def figures(topology, tmp_path_factory):
    """`figures[case]`: the figures of splash with tiles of 512 × 512 and 128 features."""
    topology("v5e")
    path = tmp_path_factory.mktemp("bundles") / "figures.json"
    flags = ["--contenders=splash", "--cases=full,causal,alibi", "--head_dims=128", f"--json={path}"]
    assert main(["bench", "bundles", *flags]) == 0
    return json.loads(path.read_text())


def test_splash_forward_has_the_known_number_of_bundles(figures):
    found = {row["case"]: row["bundles"] for row in figures["bodies"] if row["kernel"] == "forward"}
    # 1,165 and 1,167 with libtpu 0.0.50; another version schedules a little differently.
    assert set(found) == {"full", "causal"} and all(1024 < bundles < 1300 for bundles in found.values())


def test_bodies_hold_the_products_of_one_tile(figures):
    floors = {"forward": 1024, "dq": 1536, "dkv": 2048}
    assert [(row["kernel"], row["floor"]) for row in figures["bodies"]] == list(floors.items()) * 2
    for row in figures["bodies"]:
        assert row["kind"] == "all" and row["loops"] == 1
        assert row["slots"]["VPOP"] >= row["floor"] / 2  # 8 × 128 results are popped at a time, for each product
        assert all(used <= row["bundles"] * row["capacity"][unit] for unit, used in row["slots"].items())


def test_comparisons_are_those_of_the_mask(figures):
    # A vector register holds 8 × 128 pairs.
    assert {(row["case"], row["compares"]) for row in figures["bodies"]} == {("full", 0), ("causal", 512 * 512 / 1024)}


def test_call_that_splash_cannot_run_is_refused_with_its_reason(figures):
    (refused,) = figures["refused"]
    assert refused["case"] == "alibi" and "of score mods it supports one SoftCap" in refused["reason"]
