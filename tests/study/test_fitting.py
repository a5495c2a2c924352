"""Training of one model per seed, side by side."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnlab.data.tasks import repeats
from attnlab.nn import GPT
from attnlab.study import fitting

MODEL = GPT.of(vocab_size=8, num_layers=1, num_heads=2, width=8, context=12, mlp_ratio=0.0)


loss, init = fitting.next_token(MODEL).values()


def batches(step, seed):
    return repeats(step, batch_size=4, length=12, vocab_size=8, seed=seed)


def fitted(seeds, looks=(0, 7, 20), **options):
    states = fitting.fit_seeds(loss, init, batches, fitting.adamw(20, 1e-2), seeds=seeds, looks=looks, **options)
    return dict(states)


def test_seeds_side_by_side_equal_plain_training_loops():
    """Six seeds on three of four devices, because four do not divide six.

    vmap sums products in another order: 20 steps of Adam in float32 stay within 1e-4.
    """
    assert len(jax.devices()) == 4
    seeds, looks, optimizer, counted = [3, 5, 8, 9, 1, 2], [0, 7, 20], fitting.adamw(20, 1e-2), []
    together = fitted(seeds, looks, advance=counted.append)
    assert list(together) == looks and sum(counted) == 20 * len(seeds)

    @jax.jit
    def start(seed):
        params = init(jax.random.key(seed))
        return params, optimizer.init(params)

    @jax.jit
    def update(params, state, step, seed):
        updates, state = optimizer.update(jax.grad(loss)(params, batches(step, seed)), state, params)
        return optax.apply_updates(params, updates), state

    for at, seed in enumerate(seeds):
        params, state = start(seed)
        for step in range(21):
            if step in together:
                one_seed = jax.tree.map(lambda leaf, at=at: leaf[at], together[step])
                jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), one_seed, params)
            params, state = update(params, state, step, seed)


def test_next_token_loss_from_logits_equals_loss_from_targets():
    class Logits(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Embed(8, 8)(tokens)

    class Losses(nn.Module):
        @nn.compact
        def __call__(self, tokens, targets=None):
            logits = nn.Embed(8, 8)(tokens)
            if targets is None:
                return logits
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]

    (from_logits, start), (from_losses, _) = (fitting.next_token(model()).values() for model in (Logits, Losses))

    @jax.jit
    def both(key):
        variables, tokens = start(key), batches(0, 1)
        return from_logits(variables, tokens), from_losses(variables, tokens)

    one, other = both(jax.random.key(0))
    assert float(one) == pytest.approx(float(other), abs=1e-6)  # float32 means of 44 losses of size 2
