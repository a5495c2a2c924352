"""An experiment's compiled step: what is an argument of its program, and what is a constant in it."""

import re

import flax.linen as nn
import jax
import numpy as np
import pytest
import scipy.special

from attnlab import config as configs
from attnlab.data.batches import TrainBatches
from attnlab.nn import GPT
from attnlab.training import parallel, run
from attnlab.training.experiment import Experiment
from tests.parameters import parameters

BATCHES = TrainBatches(np.arange(400) % 31, context=8, batch_size=4, seed=0)


def experiment(strategy="mesh", name="adamw", model=None, **fields):
    config = configs.default()
    config.model.update(num_layers=1, width=16, context=8, dropout=0.2)
    config.steps, config.batch_size, config.optimizer.name = 4, 4, name
    config.update_from_flattened_dict(fields)
    devices = 4 if strategy == "pmap" else 1
    config = run.resolve(config).config
    return Experiment(config, vocab_size=31, model=model, parallel=parallel.make(strategy, devices))


OTHERS = {"seed": 7, "optimizer.learning_rate": 1e-4}
OF_MUON = OTHERS | {"optimizer.muon_learning_rate": 3e-3}


@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd"])
def test_program_of_a_step_is_that_of_any_seed_and_learning_rate(strategy, name):
    others = OF_MUON if name == "muon" else OTHERS
    one, other = (experiment(strategy, name, **fields).lower().as_text() for fields in ({}, others))
    assert one == other
    assert one != experiment(strategy, name, **{"optimizer.weight_decay": 0.3}).lower().as_text()


@pytest.mark.parametrize(
    "name, field", [*(("adamw", field) for field in OTHERS), *(("muon", field) for field in OF_MUON)]
)
def test_seed_and_learning_rates_change_what_a_step_computes(name, field):
    def params(**fields):
        run = experiment(name=name, **fields)
        now = experiment(name=name).create_state()
        now, _ = run.train_step(now, run.parallel.place_batch(BATCHES[0]))
        return jax.device_get(now.params)

    same = jax.tree.map(np.array_equal, params(), params(**{field: OF_MUON[field]}))
    assert not all(jax.tree.leaves(same))
    if field not in OTHERS:
        assert same["embed"]["embedding"] and not same["block_0"]["mlp"]["up"]["kernel"]


@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_step_in_bfloat16_moves_stacks_of_layers_as_integers_on_cpus(strategy):
    fields = {"precision": "bfloat16", "model.scan": True, "model.num_layers": 2, "model.dropout": 0.0}
    program = experiment(strategy, **fields).lower().as_text()
    assert re.search(r"dynamic_slice.*xui16>", program) and re.search(r"dynamic_update_slice.*xui16>", program)
    assert not re.search(r"dynamic_(update_)?slice.*xbf16>", program)


class Bigram(nn.Module):
    """A user's model, whose logits are of more tokens than the tokenizer has."""

    @nn.compact
    def __call__(self, tokens, deterministic=True, dropout_key=None):
        return nn.Embed(40, 40)(tokens)


@pytest.mark.parametrize("model", [None, GPT(40, 1, 2, 16, 8), Bigram()], ids=["config", "GPT", "module"])
def test_losses_are_over_the_tokens_of_the_tokenizer_alone(model):
    fields = {"model.vocab_size": 40, "model.dropout": 0.0} if model is None else {}
    run = experiment(model=model, **fields)
    params = parameters(run.model, BATCHES[0].tokens[:, :-1])
    tokens, targets = BATCHES[0].tokens[:, :-1], BATCHES[0].tokens[:, 1:]
    logits = np.asarray(jax.jit(run.model.apply)(params, tokens), np.float64)[..., :31]
    expected = -np.take_along_axis(scipy.special.log_softmax(logits, -1), targets[..., None], -1).mean()
    batch = run.parallel.place_batch(BATCHES[0])
    total, count = run.eval_step(params["params"], batch)
    losses = [total / count]
    if isinstance(model, Bigram):  # is compiled at once
        losses.append(run.train_step(run.create_state(params["params"]), batch)[1]["loss"])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
