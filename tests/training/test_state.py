"""The layout of layers and calls, and the losses of packed documents and of answers at some positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import config as configs
from attnlab.data.batches import Batch, TrainBatches
from attnlab.nn import GPT
from attnlab.support.errors import UserError
from attnlab.training import state
from attnlab.training.program import TrainProgram
from tests.parameters import parameters
from tests.runs import Bigram


@pytest.mark.parametrize("layers, fsdp, on_cpu, on_gpu", [(3, 1, 0, 0), (12, 1, 1, 0), (48, 1, 1, 1), (2, 2, 1, 1)])
def test_layers_are_a_loop_if_that_is_faster_or_smaller(layers, fsdp, on_cpu, on_gpu):
    config = configs.default()
    config.model.num_layers, config.parallel.mesh.fsdp = layers, fsdp
    assert [state.scans(configs.completed(config), platform) for platform in ("cpu", "gpu")] == [on_cpu, on_gpu]
    config.model.scan = True
    assert state.scans(configs.completed(config), "gpu")


def test_gpu_calls_run_many_steps_of_small_models_unless_set():
    config = configs.RunConfig.of({})
    steps = [state.steps_per_call(config, *args) for args in (("cpu", 1), ("gpu", 10_000_000), ("gpu", 10_000_001))]
    assert steps == [1, 64, 1] and state.steps_per_call(config.changed({"parallel.steps_per_call": 3}), "gpu", 1) == 3


def test_loss_of_packed_documents_is_the_mean_over_targets_within_them(float64):
    starts, rng = np.array([0, 7, 8, 20, 33, 41, 60]), np.random.default_rng(0)
    tokens = rng.integers(0, 11, 66)
    packed = TrainBatches(tokens, context=64, batch_size=1, seed=0, documents=starts)[0]
    model = GPT.of(vocab_size=11, num_layers=1, num_heads=2, width=16, context=64, dtype=jnp.float64)
    params = jax.tree.map(np.float64, parameters(model, packed.tokens[:, :1])["params"])
    documents = [packed.tokens[packed.segments == number] for number in range(packed.segments.max() + 1)]
    # Separately, each document begins at position 0 and is padded at its end.
    alone = np.array([np.pad(document, (0, 65 - len(document))) for document in documents])

    @jax.jit
    def losses(params):
        document_losses = model.apply({"params": params}, alone[:, :-1], targets=alone[:, 1:])
        loss, _ = state.gradients(model, params, packed, jax.random.key(1))
        return document_losses, loss, state.eval_step(model, params, packed)

    document_losses, loss, sums = losses(params)
    target_losses = [np.asarray(row)[: len(document) - 1] for row, document in zip(document_losses, documents)]
    total, count = np.concatenate(target_losses).sum(), sum(map(len, target_losses))
    assert count < 64
    np.testing.assert_allclose(loss, total / count, rtol=1e-10)
    np.testing.assert_allclose(sums, [total, count], rtol=1e-10)


def test_model_without_segments_cannot_train_on_packed_documents():
    config = configs.RunConfig.of({"data.packing": "documents", "parallel.mesh.data": 1})
    with pytest.raises(UserError, match="config.data.packing = 'documents', .*segments="):
        TrainProgram(config, 8, model=Bigram(8))


GPT_OF_11 = GPT.of(vocab_size=11, num_layers=1, num_heads=2, width=8, context=6)


@pytest.mark.parametrize("model", [GPT_OF_11, Bigram(8)], ids=["GPT", "another model"])
def test_answers_at_places_equal_losses_and_accuracy_of_full_pass(model):
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

    expected, actual = both(params)
    assert expected[1][1] == 3 and (expected[0][0] > 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)
