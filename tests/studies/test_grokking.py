"""The study `grokking`: the gradient filter, power by frequency, and the verdict."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab._studies import grokking
from attnlab._studies.grokking import DECAY, DECAY_FAST, KINDS, NO_DECAY, modular_sums
from tests.studies import claims


def test_grokfast_equals_a_loop_in_numpy():
    rng = np.random.default_rng(0)
    gradients, average = rng.normal(size=(20, 3)), np.zeros(3)
    filtered = grokking.grokfast(0.9, 2.0)
    state, step = filtered.init(jnp.zeros(3)), jax.jit(filtered.update)
    for gradient in gradients:
        update, state = step(gradient.astype(np.float32), state)
        average = 0.9 * average + 0.1 * gradient
        np.testing.assert_allclose(update, gradient + 2 * average, atol=1e-6)  # float32


strongest_share = jax.jit(grokking.strongest_share)


def test_share_of_five_equals_projections_on_sines_and_cosines():
    table = np.random.default_rng(1).normal(size=(59, 4))
    at, power = np.arange(59), []
    for frequency in range(1, 30):
        angle = 2 * np.pi * frequency * at / 59
        power.append(((np.cos(angle) @ table) ** 2 + (np.sin(angle) @ table) ** 2).sum())
    expected = sum(sorted(power)[-5:]) / sum(power)
    assert float(strongest_share(table.astype(np.float32))) == pytest.approx(expected, rel=1e-5)


def test_share_of_five_waves_is_one():
    waves = sum(np.cos(2 * np.pi * k * np.arange(59) / 59 + k) for k in (2, 7, 11, 20, 29))
    # Float32: rounding of 1e-7 times the largest amplitude, squared, is far below.
    assert float(strongest_share(np.tile(waves[:, None], 4).astype(np.float32))) == pytest.approx(1, abs=1e-5)


def make_rows(learned=100, grokked=(300, 500), share=0.8, undecayed=0.3, undecayed_accuracy=0.2, random=0.25):
    rows = []
    for seed in range(2):
        for kind in KINDS:
            for step in range(0, 700, 100):
                right = float(step >= grokked[seed]) if kind == DECAY else 0.3 * (kind == DECAY_FAST)
                end = share if kind == DECAY else undecayed
                row = {"seed": seed, "kind": kind, "step": step, "train accuracy": float(step >= learned)}
                row["held-out accuracy"] = undecayed_accuracy if kind == NO_DECAY and step else right
                rows.append(row | {"share of five": random + (end - random) * step / 600 + 0.001 * seed})
    return rows


def test_grokking_claim():
    assert "300, 500" in grokking.judge(make_rows()).parts[0][1]
    changes = {
        "a seed never groks": (0, {"grokked": (300, 900)}),
        "no delay": (0, {"learned": 300}),
        "power is spread": (1, {"share": 0.45}),
        "few frequencies without decay": (2, {"undecayed": 0.85}),
        "grokked without decay": (3, {"undecayed_accuracy": 0.95}),
    }
    refuted = {name: (part, make_rows(**change)) for name, (part, change) in changes.items()}
    claims.check(grokking, make_rows(), refuted, "Weight decay makes")


def test_each_pair_is_in_one_part_with_its_sum():
    train, held_out = modular_sums(7, train=0.3)
    tokens, targets = (np.concatenate(parts) for parts in zip(train, held_out))
    assert len(train.targets) == 15  # 0.3 · 49, rounded
    assert {tuple(pair) for pair in tokens[:, :2]} == {(a, b) for a in range(7) for b in range(7)}
    assert (tokens[:, 2] == 7).all() and (targets == tokens[:, :2].sum(1) % 7).all()
