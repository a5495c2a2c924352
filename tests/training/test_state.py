"""Steps that are skipped because they are not finite, and the loss of packed documents."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import config as configs
from attnlab.data.batches import Batch, TrainBatches
from attnlab.nn import GPT
from attnlab.support.errors import UserError
from attnlab.training import optimizer as optimizers
from attnlab.training import state
from attnlab.training.experiment import Experiment
from tests.parameters import parameters

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


def make_step(poison, **options):
    """The initial state of a bigram model, and its jitted training step."""
    model = Bigram(poison)
    optimizer = optimizers.make(configs.Optimizer(), 100, **options)
    first = jax.jit(lambda: state.create(model, optimizer, 0))()
    return first, jax.jit(functools.partial(state.train_step, model, optimizer, 0, 1))


@pytest.mark.parametrize("layers, fsdp, on_cpu, on_gpu", [(3, 1, 0, 0), (12, 1, 1, 0), (48, 1, 1, 1), (2, 2, 1, 1)])
def test_layers_are_a_loop_where_that_is_faster_or_smaller(layers, fsdp, on_cpu, on_gpu):
    config = configs.default()
    config.model.num_layers, config.parallel.mesh.fsdp = layers, fsdp
    assert [state.scans(configs.completed(config), platform) for platform in ("cpu", "gpu")] == [on_cpu, on_gpu]
    config.model.scan = True
    assert state.scans(configs.completed(config), "gpu")


def test_calls_on_gpus_have_many_steps_of_small_models_unless_set():
    config = configs.RunConfig.of({})
    found = [state.steps_per_call(config, *of) for of in (("cpu", 1), ("gpu", 10_000_000), ("gpu", 10_000_001))]
    assert found == [1, 64, 1] and state.steps_per_call(config.changed({"parallel.steps_per_call": 3}), "gpu", 1) == 3


def test_train_step_nonfinite_is_skipped_and_counted():
    first, step = make_step(float("nan"), skip_nonfinite=True)
    first, metrics = jax.device_get(step(first, batch(1)))
    assert metrics["skipped"] == 0
    second, metrics = jax.device_get(step(first, batch(POISON)))
    assert metrics["skipped"] == 1 and not np.isfinite(metrics["grad_norm"]) and second.step == 2
    jax.tree.map(np.testing.assert_array_equal, second.params, first.params)
    assert np.isfinite(metrics["param_norm"])
    third, metrics = jax.device_get(step(second, batch(1)))
    assert metrics["skipped"] == 1 and np.isfinite(metrics["loss"])
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), third.params, second.params)))


def test_train_step_without_skip_applies_nonfinite_updates():
    first, step = make_step(float("nan"))
    now, metrics = jax.device_get(step(first, batch(POISON)))
    assert "skipped" not in metrics and not np.isfinite(jax.tree.leaves(now.params)[0]).all()


def test_loss_of_packed_documents_is_the_mean_over_targets_within_them(float64):
    starts, rng = np.array([0, 7, 8, 20, 33, 41, 60]), np.random.default_rng(0)
    tokens = rng.integers(0, 11, 66)
    packed = TrainBatches(tokens, context=64, batch_size=1, seed=0, documents=starts)[0]
    model = GPT.of(vocab_size=11, num_layers=1, num_heads=2, width=16, context=64, dtype=jnp.float64)
    params = jax.tree.map(np.float64, parameters(model, packed.tokens[:, :1])["params"])
    documents = [packed.tokens[packed.segments == number] for number in range(packed.segments.max() + 1)]
    # Alone, each begins at position 0, and what pads it comes after it.
    alone = np.array([np.pad(document, (0, 65 - len(document))) for document in documents])

    @jax.jit
    def losses(params):
        of_documents = model.apply({"params": params}, alone[:, :-1], targets=alone[:, 1:])
        loss, _ = state.gradients(model, params, packed, jax.random.key(1))
        return of_documents, loss, state.eval_step(model, params, packed)

    of_documents, loss, sums = losses(params)
    of_targets = [np.asarray(row)[: len(document) - 1] for row, document in zip(of_documents, documents)]
    total, count = np.concatenate(of_targets).sum(), sum(map(len, of_targets))
    assert count < 64
    np.testing.assert_allclose(loss, total / count, rtol=1e-10)
    np.testing.assert_allclose(sums, [total, count], rtol=1e-10)


def test_model_without_segments_cannot_train_on_packed_documents():
    config = configs.RunConfig.of({"data.packing": "documents", "parallel.mesh.data": 1})

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, tokens, deterministic=True, dropout_key=None):
            return nn.Embed(8, 8)(tokens)

    with pytest.raises(UserError, match="config.data.packing = 'documents', .*segments="):
        Experiment(config, 8, model=Plain())


@pytest.mark.parametrize(
    "model",
    [GPT.of(vocab_size=11, num_layers=1, num_heads=2, width=8, context=6), Bigram(1.0)],
    ids=["GPT", "another model"],
)
def test_answers_at_places_have_the_losses_and_accuracy_of_all_positions(model):
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 7, (3, 7), np.int32), np.full((3, 6), -1, np.int32)
    targets[[0, 0, 1, 2, 2], [5, 1, 3, 0, 4]] = [2, 3, 1, 5, 0]
    places = np.argsort(targets < 0, axis=1, kind="stable")[:, :2].astype(np.int32)
    whole = Batch(tokens, np.arange(3, dtype=np.int32), np.array([1, 1, 0], np.float32), targets=targets)
    params = parameters(model, tokens[:, :-1])["params"]

    @jax.jit
    def both(params):
        return [
            (state.gradients(model, params, batch, jax.random.key(0)), state.eval_step(model, params, batch))
            for batch in (whole, whole._replace(places=places))
        ]

    expected, found = both(params)
    assert expected[1][1] == 3 and (expected[0][0] > 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
