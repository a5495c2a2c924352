"""A run's compiled step: which values are arguments of its program, and which are constants in it."""

import functools
import re

import flax.linen as nn
import jax
import numpy as np
import pytest
import scipy.special

from attnlab import config as configs
from attnlab.data.batches import TrainBatches
from attnlab.nn import GPT, Mlp
from attnlab.training import parallel, run
from attnlab.training.program import TrainProgram, shared_programs
from tests.parameters import parameters

BATCHES = TrainBatches(np.arange(400) % 31, context=8, batch_size=4, seed=0)


class Small(nn.Module):
    """A user's model with a matrix for Muon, dropout, and logits for more tokens than the tokenizer has."""

    dropout: float = 0.2

    @nn.compact
    def __call__(self, tokens, deterministic=True, dropout_key=None):
        x = Mlp(name="mlp")(nn.Embed(40, 8, name="embed")(tokens))
        if not deterministic:
            x = x * jax.random.bernoulli(dropout_key[0], 1 - self.dropout, x.shape)
        return nn.Dense(40, use_bias=False)(x)


def experiment(strategy="mesh", name="adamw", model=None, **fields):
    sizes = {"model.num_layers": 1, "model.width": 16, "model.context": 8, "model.dropout": 0.2, "batch_size": 4}
    config = run.resolve(configs.RunConfig.of({**sizes, "steps": 4, "optimizer.name": name, **fields})).config
    on = parallel.make(strategy, 4 if strategy == "pmap" else 1)
    return TrainProgram(config, vocab_size=31, model=model, parallel=on)


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
OTHERS = {"seed": 7, "optimizer.learning_rate": 1e-4}
OF_MUON = OTHERS | {"optimizer.muon_learning_rate": 3e-3}


@pytest.mark.parametrize(
    "strategy, name", [("mesh", "muon"), ("pmap", "adamw"), SLOW("mesh", "sgd"), SLOW("pmap", "lion")], ids=str
)
def test_step_program_is_the_same_for_any_seed_and_learning_rate(strategy, name):
    def program(**fields):
        return experiment(strategy, name, Small(), **fields).lower().as_text()

    assert program() == program(**(OF_MUON if name == "muon" else OTHERS))
    assert program() != program(**{"optimizer.weight_decay": 0.3})


def test_first_step_creates_model_constants_outside_transfer_guard():
    program = experiment(**{"model.positions": "alibi", "model.num_heads": 2})  # nothing asked for its backend before
    assert np.isfinite(program.train_steps(program.create_state(), [BATCHES[0]])[1]["loss"])


def test_experiments_with_shared_programs_trace_equal_steps_once():
    calls = []

    class Counted(Small):
        def __call__(self, tokens, **options):
            calls.append(tokens.shape)
            return super().__call__(tokens, **options)

    def losses(program):
        return program.train_steps(program.create_state(), [BATCHES[0]])[1]["loss"]

    alone = losses(experiment(model=Counted(), **OTHERS))
    with shared_programs():
        losses(experiment(model=Counted()))
        traced = len(calls)
        np.testing.assert_array_equal(losses(experiment(model=Counted(), **OTHERS)), alone)
        assert len(calls) == traced + 2  # only for the shapes of parameters and of logits
        for other in ({"strategy": "pmap"}, {"model": Counted(0.3)}, {"optimizer.weight_decay": 0.3}):
            before = len(calls)
            losses(experiment(**{"model": Counted()} | other))
            assert len(calls) > before + 2


@pytest.mark.parametrize("name, fields", [SLOW("adamw", OTHERS), ("muon", OF_MUON)])  # muon leaves biases to adamw
def test_seed_and_learning_rates_change_what_a_step_computes(name, fields):
    def params(**changes):
        run = experiment(name=name, model=Small(), **changes)
        now, _ = run.train_steps(run.create_state(begin), [BATCHES[0]])
        return jax.device_get(now.params)

    begin = parameters(Small(), BATCHES[0].tokens)["params"]
    expected = params()
    for field, value in fields.items():
        same = jax.tree.map(np.array_equal, expected, params(**{field: value}))
        assert not all(jax.tree.leaves(same)), field
        if field not in OTHERS:
            assert same["embed"]["embedding"] and not same["mlp"]["up"]["kernel"]


def test_step_in_bfloat16_moves_stacks_of_layers_as_integers_on_cpus():
    fields = {"precision": "bfloat16", "model.scan": True, "model.num_layers": 2, "model.dropout": 0.0}
    program = experiment(**fields).lower().as_text()
    assert re.search(r"dynamic_slice.*xui16>", program) and re.search(r"dynamic_update_slice.*xui16>", program)
    assert not re.search(r"dynamic_(update_)?slice.*xbf16>", program)


@pytest.mark.parametrize(
    "model",
    [None, GPT.of(vocab_size=40, num_layers=1, num_heads=2, width=16, context=8), Small(dropout=0.0)],
    ids=["config", "GPT", "module"],
)
def test_losses_are_only_over_the_tokens_of_the_tokenizer(model):
    fields = {"model.vocab_size": 40, "model.dropout": 0.0} if model is None else {}
    run = experiment(model=model, **fields)
    params = parameters(run.model, BATCHES[0].tokens[:, :-1])
    tokens, targets = BATCHES[0].tokens[:, :-1], BATCHES[0].tokens[:, 1:]
    logits = np.asarray(jax.jit(run.model.apply)(params, tokens), np.float64)[..., :31]
    expected = -np.take_along_axis(scipy.special.log_softmax(logits, -1), targets[..., None], -1).mean()
    batch = run.parallel.place_batch(BATCHES[0])
    total, count = run.eval_step()(params["params"], batch)
    losses = [total / count]
    if isinstance(model, Small):  # compiles fast
        losses.append(run.train_steps(run.create_state(params["params"]), [BATCHES[0]])[1]["loss"][0])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
