"""With `on_nonfinite="skip"`, a step whose loss or gradient is not finite is skipped and counted."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import config as configs
from attnlab.data.batches import Batch
from attnlab.training import optimizer as optimizers
from attnlab.training import state

POISON = 7  # a token that makes the model's logits `poison`


class Bigram(nn.Module):
    """Logits of the next token from the last one, for eight tokens."""

    poison: float

    @nn.compact
    def __call__(self, tokens, **_):
        logits = nn.Embed(8, 8)(tokens)
        return jnp.where((tokens == POISON).any(), self.poison, 1.0) * logits


def batch(first):
    tokens = np.full((2, 4), 1, np.int32)
    tokens[0, 0] = first
    return Batch(tokens, np.arange(2, dtype=np.int32), np.ones(2, np.float32))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_train_step_nonfinite_is_skipped_and_counted(poison):
    model = Bigram(poison)
    optimizer = optimizers.make(configs.default().optimizer, 100, skip_nonfinite=True)
    step = jax.jit(functools.partial(state.train_step, model, optimizer, 0, 1))
    first, metrics = step(state.create(model, optimizer, 0), batch(1))
    assert metrics["skipped"] == 0
    second, metrics = step(first, batch(POISON))
    assert metrics["skipped"] == 1 and not np.isfinite(metrics["grad_norm"]) and second.step == 2
    jax.tree.map(np.testing.assert_array_equal, second.params, first.params)
    assert np.isfinite(metrics["param_norm"])
    third, metrics = step(second, batch(1))
    assert metrics["skipped"] == 1 and np.isfinite(metrics["loss"])
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), third.params, second.params)))


def test_train_step_without_skip_applies_nonfinite_updates():
    model = Bigram(float("nan"))
    optimizer = optimizers.make(configs.default().optimizer, 100)
    step = jax.jit(functools.partial(state.train_step, model, optimizer, 0, 1))
    now, metrics = step(state.create(model, optimizer, 0), batch(POISON))
    assert "skipped" not in metrics and not np.isfinite(jax.tree.leaves(now.params)[0]).all()
