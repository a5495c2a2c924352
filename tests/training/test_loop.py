"""Steps grouped into calls and runs trained together give what each step and each run would give alone."""

import contextlib
import functools
import io
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab import config as configs
from attnlab import train
from attnlab.data.batches import Batch, Stacked, TrainBatches
from attnlab.nn import GPT
from attnlab.nn.config import KINDS
from attnlab.sweeping import together
from attnlab.training import optimizer as optimizers
from attnlab.training import parallel, profiling, state
from attnlab.training.loop import TrainLoop
from attnlab.training.members import Members
from attnlab.training.population import Population
from attnlab.training.preemption import PreemptionHandler
from attnlab.training.program import TrainProgram
from attnlab.training.run import load, open_run, resolve
from tests import runs
from tests.parameters import parameters

pytestmark = pytest.mark.usefixtures("shared_programs")

BATCHES = TrainBatches(np.random.default_rng(0).integers(0, 31, 5000), context=16, batch_size=8, seed=0)
SEEDS_AND_RATES = ((0, 3e-3), (1, 1e-3), (2, 1e-2))
OPTIONS = {"local": {"model.local.window": 5}}
THREE = Population(3)
FAST = ("attention", "gated_delta")  # one mixer per operator


def experiment(strategy="mesh", devices=1, model=None, **fields):
    sizes = {"num_layers": 1, "num_heads": 2, "width": 16, "context": 16, "dropout": 0.1}
    values = {"steps": 50, "batch_size": 8, "precision": "float32"} | {f"model.{n}": x for n, x in sizes.items()}
    on = parallel.make(strategy, devices)
    return TrainProgram(configs.RunConfig.of(values | fields), vocab_size=31, parallel=on, model=model)


def several(run):
    """Configs of three runs, their batches and initial states."""
    run_configs = [run.config.changed({"seed": n, "optimizer.learning_rate": rate}) for n, rate in SEEDS_AND_RATES]
    draw = functools.partial(parameters, run.model, BATCHES[0].tokens[:, :-1])
    states = [run.create_state(draw(seed=config.seed)["params"]) for config in run_configs]
    return run_configs, [BATCHES.of_seed(config.seed) for config in run_configs], states


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(jax.device_get(tree))]


# --- calls


def test_steps_have_the_same_bits_in_any_grouping():
    run, results = experiment(model=runs.Bigram(31)), []
    for most, groups in ((1, [1] * 7), (8, [7]), (8, [3, 1, 3]), (4, [4, 3])):
        now, at, losses = run.create_state(), 0, []
        for count in groups:
            now, metrics = run.train_steps(now, [BATCHES[at + n] for n in range(count)], max_steps=most)
            losses, at = [*losses, *np.asarray(metrics["loss"])[:count]], at + count
        results.append([*leaves(now), np.array(losses)])
    for other in results[1:]:
        assert all(map(np.array_equal, results[0], other))
    assert len(set(results[0][-1])) == 7  # steps differ


def test_run_killed_at_every_step_of_a_call_resumes_in_other_calls(tmp_path, monkeypatch):
    """A call writes nothing to disk before its end, so it does not matter when a kill interrupts it."""
    as_fast = property(lambda timer: 1e-9, lambda timer, seconds: None)
    monkeypatch.setattr(profiling.Timer, "pace", as_fast, raising=False)  # calls do not end because of time
    counts, take = [], TrainProgram.train_steps
    monkeypatch.setattr(TrainProgram, "train_steps", lambda *args: counts.append(len(args[2])) or take(*args))
    overrides = {"model": runs.Bigram()}
    fields = {"data__tokenizer": "byte", "model__dropout": 0.0}
    train.train(runs.quick(**fields), tmp_path / "undisturbed", **overrides)
    for step in range(1, 12):
        config = runs.quick(parallel__steps_per_call=(5, 3)[step % 2], **fields)
        with pytest.raises(runs.CrashError), contextlib.redirect_stdout(io.StringIO()):
            train.train(config, tmp_path / "run", on_step=runs.crash_at(step), **overrides)
    train.train(runs.quick(parallel__steps_per_call=16, **fields), tmp_path / "run", **overrides)
    assert set(counts) == {1, 2, 3}  # from one save or evaluation to the next: at 4, 5, 8, 10 and 12
    assert runs.records(tmp_path / "run") == runs.records(tmp_path / "undisturbed")
    assert runs.same_checkpoints(tmp_path / "run", tmp_path / "undisturbed")


def test_token_rates_of_calls_use_their_own_time(tmp_path, monkeypatch):
    """A dispatch lasts as long as its call here, like that of a loop on a GPU: 1/128 s per step."""
    clock, take = types.SimpleNamespace(now=0.0), TrainProgram.train_steps

    def train_steps(run, state, batches, *rest):
        clock.now += len(batches) / 128
        return jax.block_until_ready(take(run, state, batches, *rest))

    monkeypatch.setattr(TrainProgram, "train_steps", train_steps)
    monkeypatch.setattr(profiling, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    fields = {"data__tokenizer": "byte", "model__dropout": 0.0, "steps": 32, "eval__every": 13, "checkpoint__every": 64}
    config = runs.quick(parallel__steps_per_call=4, log__every=1, **fields)
    train.train(config, tmp_path / "run", model=runs.Bigram())
    assert {*attnlab.metrics(tmp_path / "run", "train")["tokens_per_second"]} == {8 * 16 * 128}


# --- runs together


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in FAST else pytest.mark.slow) for k in KINDS])
def test_step_of_joint_runs_equals_each_run_alone(kind):
    """Uses SGD, because Adam's first step is as large as the rate even where the gradient is only rounding error.

    Norms are sums of about 10⁴ squares in another order: ε√10⁴ = 6e-6.
    """
    run = experiment(**{"model.layers": kind, "optimizer.name": "sgd"} | OPTIONS.get(kind, {}))
    run_configs, batches, states = several(run)
    joined = THREE.join(jax.tree.map(jnp.copy, states))
    expected = [run.train_steps(one, [b[0]], run.per_run([c])) for one, b, c in zip(states, batches, run_configs)]
    (after, alive), metrics = run.train_steps(joined, [Stacked(batches)[0]], run.per_run(run_configs), population=THREE)
    assert alive.all() and len(set(np.asarray(metrics["loss"])[0])) == 3
    for index, (alone, single_metrics) in enumerate(expected):
        for name, value in single_metrics.items():
            rtol = 1e-6 if name == "loss" else 6e-6
            np.testing.assert_allclose(metrics[name][0, index], value[0], rtol=rtol, err_msg=name)
        for a, b in zip(leaves(THREE.of_run((after, alive), index)), leaves(alone)):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_twenty_float64_steps_of_joint_runs_equal_each_run_alone():
    with jax.enable_x64(True):
        model = GPT.of(vocab_size=31, num_layers=1, num_heads=2, width=16, context=16, dtype=jnp.float64)
        tokens = BATCHES[0].tokens[:, :-1]
        begun = [jax.tree.map(np.float64, parameters(model, tokens, seed=seed)["params"]) for seed in range(3)]
        rates = np.array([3e-3, 1e-3, 1e-2])
        config = configs.Optimizer(warmup_steps=4)

        def step(now, batch, per_run):
            seed, rate = per_run
            optimizer = optimizers.make(config, 20, at=optimizers.Peaks(rate, rate))
            return state.train_step(model, optimizer, seed, 1, now, batch)

        init = optimizers.make(config, 20).init
        states = [state.TrainState(np.int32(0), params, init(params)) for params in begun]
        run_batches = [BATCHES.of_seed(seed) for seed in range(3)]
        taken = [jax.tree.map(lambda *x: np.stack(x), *(one[n] for n in range(20))) for one in run_batches]
        alone = jax.jit(functools.partial(state.repeated, step))
        expected = [alone(*run, (np.int32(n), rates[n]), 20)[1]["loss"] for n, run in enumerate(zip(states, taken))]
        many = jax.jit(functools.partial(state.repeated, THREE.step(step)))
        batches = jax.tree.map(lambda *x: np.stack(x, 1), *taken)
        _, metrics = many(
            THREE.join(jax.tree.map(jnp.asarray, states)), batches, (np.arange(3, dtype=np.int32), rates), 20
        )
        assert metrics["loss"].dtype == jnp.float64
        np.testing.assert_allclose(metrics["loss"], np.stack(expected, 1), rtol=0, atol=1e-9)


@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_joint_runs_over_devices_equal_one_device(strategy):
    losses = []
    for run in (experiment(model=runs.Bigram(31)), experiment(strategy, 4, model=runs.Bigram(31))):
        run_configs, batches, states = several(run)
        _, metrics = run.train_steps(
            THREE.join(states), [Stacked(batches)[0]], run.per_run(run_configs), population=THREE
        )
        losses.append(np.asarray(metrics["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-6)


class Fragile(runs.Bigram):
    """A Bigram whose loss is NaN for batches that begin with token 30."""

    def __call__(self, tokens, **options):
        return super().__call__(tokens, **options) + jnp.where(tokens[0, 0] == 30, jnp.nan, 0.0)


def test_diverged_run_keeps_its_last_state_and_others_continue():
    """The state is kept even on batches after the batch that makes the run diverge."""
    run = experiment(model=Fragile(31))
    run_configs, batches, states = several(run)
    stacked = [Stacked(batches)[n] for n in range(5)]
    for n, batch in enumerate(stacked):
        batch.tokens[:, 0, 0] = [0, 30 if n == 2 else 0, 0]
    per_run = run.per_run(run_configs)
    after_two, _ = run.train_steps(THREE.join(states), stacked[:2], per_run, 2, THREE)
    (after, alive), metrics = run.train_steps(after_two, stacked[2:], per_run, 8, THREE)
    assert alive.tolist() == [True, False, True] and after.step.tolist() == [5, 2, 5]
    assert np.isfinite(metrics["loss"][:3]).tolist() == [[True, False, True], [True] * 3, [True] * 3]
    _, batches, states = several(run)
    single_batches = [Batch(*(None if x is None else x[1] for x in b)) for b in stacked[:2]]
    alone, _ = run.train_steps(states[1], single_batches, run.per_run(run_configs[1:2]), 2)
    for a, b in zip(leaves(THREE.of_run((after, alive), 1)), leaves(alone)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# --- folders


def configs_of(folder, seeds, **fields):
    return {folder / f"seed={seed}": resolve(runs.quick(seed=seed, **fields)).config for seed in seeds}


def quietly(function, *arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return function(*arguments), out.getvalue()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of four runs, trained one after another."""
    folder = tmp_path_factory.mktemp("alone")
    assert quietly(together.train_all, configs_of(folder, range(4)), "1")[0] == 0
    return folder


def assert_alike(folder, others, seeds):
    """Equal records, to the rounding of a dozen steps: Adam's steps do not shrink with a gradient near 0."""
    for seed in seeds:
        actual, expected = (runs.records(one / f"seed={seed}") for one in (folder, others))
        assert [(each["step"], each["split"]) for each in actual] == [(x["step"], x["split"]) for x in expected]
        for each, other in zip(actual, expected):
            numbers = {name: x for name, x in other.items() if isinstance(x, float)}
            assert {name: each[name] for name in numbers} == pytest.approx(numbers, rel=1e-4)
        assert runs.kept(folder / f"seed={seed}") == runs.kept(others / f"seed={seed}")


def test_first_of_sequential_runs_equals_a_separate_run(alone):
    assert runs.records(alone / "seed=0") == runs.records(runs.finished()[0])
    assert runs.same_checkpoints(alone / "seed=0", runs.finished()[0])


def test_joint_runs_save_like_single_runs_and_resume_in_any_grouping(alone, tmp_path):
    fields = {"parallel__steps_per_call": 5}
    plans = [resolve(config, workdir) for workdir, config in configs_of(tmp_path, range(2), **fields).items()]
    shared = load(plans[0])
    with pytest.raises(runs.CrashError), contextlib.ExitStack() as opened, contextlib.redirect_stdout(io.StringIO()):
        preemption = opened.enter_context(PreemptionHandler())
        members = [opened.enter_context(open_run(plan, shared=shared, together=2)) for plan in plans]
        TrainLoop(members, preemption, on_step=runs.crash_at(7)).run()
    assert [runs.kept(tmp_path / f"seed={seed}") for seed in range(2)] == [[4], [4]]
    run, out = quietly(train.train, runs.quick(seed=0, **fields), tmp_path / "seed=0")  # one continues alone
    assert run.signal == 0 and "resumed from step 4" in out
    code, out = quietly(together.train_all, configs_of(tmp_path, range(1, 4)), "2")  # one alone, two together
    assert code == 0
    assert_alike(tmp_path, alone, range(4))


def test_joint_runs_that_fail_continue_in_halves(alone, tmp_path, monkeypatch):
    """They run out of memory at the first step, and again after some of them have saved a checkpoint."""
    run, tried = TrainLoop.run, []

    def failing(self):
        tried.append(len(self.members.runs))
        if len(tried) == 1:
            raise MemoryError("no room")
        if len(tried) == 2:
            self.on_step = runs.crash_at(7)
            try:
                run(self)
            except runs.CrashError:
                raise MemoryError("no room") from None
        return run(self)

    monkeypatch.setattr(TrainLoop, "run", failing)
    code, out = quietly(together.train_all, configs_of(tmp_path, range(3)), "3")
    assert code == 0 and tried[0] == 3 and "3 runs failed together (out of memory" in out
    assert all(f'["seed={n}", ""]' in out for n in (1, 2)) and '["seed=0", "out of memory' in out
    monkeypatch.undo()
    assert quietly(together.train_all, configs_of(tmp_path, range(3)), "1")[0] == 0
    assert_alike(tmp_path, alone, range(3))


def test_joint_runs_that_all_diverge_are_reported_and_end(tmp_path):
    fields = {"eval__every": 1, "optimizer__learning_rate": 1e30}
    code, out = quietly(together.train_all, configs_of(tmp_path, range(2), **fields), "2")
    assert code == 0 and all(f'["seed={n}", "param_norm is' in out for n in range(2))


def test_signal_during_the_last_save_starts_no_other_run(tmp_path, monkeypatch):
    finish = Members.finish

    def interrupted(self, step):
        finish(self, step)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Members, "finish", interrupted)
    code, out = quietly(together.train_all, configs_of(tmp_path, range(2)), "1")
    assert code == 128 + signal.SIGTERM and '["seed=0", ""]' in out and not (tmp_path / "seed=1").exists()


def test_patience_ends_one_run_of_several(tmp_path):
    fields = {"eval__every": 1, "eval__patience": 1, "optimizer__learning_rate": 1.0, "steps": 30}
    code, out = quietly(together.train_all, configs_of(tmp_path, range(3), **fields), "3")
    last = [runs.records(tmp_path / f"seed={seed}")[-1] for seed in range(3)]
    assert code == 0 and all(each["split"] == "final" for each in last) and len({each["step"] for each in last}) > 1
    assert "stopped early at step" in out and all(f'["seed={n}", ""]' in out for n in range(3))
    assert all(runs.kept(tmp_path / f"seed={n}")[-1] == each["step"] for n, each in enumerate(last))
