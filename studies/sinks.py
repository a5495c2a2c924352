"""Attention sinks are dormant heads: with nothing to add, a head attends to a first token without a value.

Bigram-Backcopy (Guo et al. 2024, "Active-Dormant Attention Heads"): a trigger is followed by the token before it once
more, any other token by the next token of a Markov chain. One layer of one head and an MLP solves it if the head copies
at triggers and adds nothing elsewhere; but a softmax has to attend to something. The study measures the weight on the
first token and what the head is worth, at triggers and elsewhere, and the length of the first token's value relative to
the others'. Controls: uniform causal attention, which is exact; the untrained model; a learned softmax logit without a
value (`MultiHeadAttention(sinks=True)`); a sigmoid in place of the softmax (Gu et al. 2024, "When Attention Sink
Emerges"); and SGD in place of Adam. Losses are given above the exact oracle, the chain's entropy. Our model is smaller
(width 64, 64 tokens), and its chain is drawn from a Dirichlet distribution rather than counted in Shakespeare.
Positions are learned vectors, and initial weights have a standard deviation of 0.02. With rotary positions and larger
initial weights, tried first on two seeds, we found no sink.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.data.tasks import TEST
from attnlab.data.tasks.task_draws import Number, check_least, compiled, key_of
from attnlab.masks import Causal
from attnlab.nn import Block, LearnedPositions, Mlp, MultiHeadAttention
from attnlab.results.statistics import Interval
from attnlab.study.fitting import adamw, fit_seeds, next_token
from attnlab.study.report import Advance, Options, Verdict
from attnlab.types import Array

VOCABULARY, TRIGGERS, WIDTH, LENGTH, BATCH, HELD_OUT = 64, 3, 64, 64, 32, 256
SMALL = nn.initializers.normal(0.02)
SOFTMAX, SINK, SIGMOID, SGD = "softmax", "softmax with a sink logit", "sigmoid", "softmax, SGD"
CONDITIONS = (SOFTMAX, SINK, SIGMOID, SGD)


class Size(NamedTuple):
    """Size of the study: seeds, updates, and measurements during training."""

    seeds: int
    steps: int
    looks: int


FAST = Size(seeds=2, steps=360, looks=5)
FULL = Size(seeds=6, steps=1000, looks=11)


@compiled
def backcopy(
    step: Number,
    *,
    batch_size: int,
    length: int,
    vocab_size: int = 64,
    triggers: int = 3,
    rate: float = 0.2,
    seed: Number = 0,
) -> Int[Array, "B T"]:
    """Draw sequences `[B, T]` of the Bigram-Backcopy task (Guo et al. 2024, section 2).

    Sequences begin with token 0, which occurs nowhere else. After a trigger, one of the tokens 1 … triggers, the token
    before it is repeated; any other token is followed by the next token of a Markov chain, `backcopy_chain`.

    Args:
      vocab_size: tokens are 0 … vocab_size − 1.
      triggers: number of trigger tokens.
      rate: probability that a trigger follows a token that is neither a trigger nor the first.
    """
    check_least(batch_size=batch_size, length=length, triggers=triggers)
    check_least(triggers + 3, vocab_size=vocab_size)
    if not 0 < rate < 1:
        raise ValueError(f"rate = {rate}: expected a rate between 0 and 1")
    bounds = backcopy_chain(seed, vocab_size, triggers, rate).cumsum(-1)

    def follow(tokens, u):
        before, token = tokens
        drawn = (u[:, None] >= bounds[token]).sum(-1, dtype=jnp.int32)
        # The sum of probabilities may fall short of 1 by rounding, hence the minimum.
        following = jnp.where((token >= 1) & (token <= triggers), before, jnp.minimum(drawn, vocab_size - 1))
        return (token, following), token

    first = jnp.zeros(batch_size, jnp.int32)
    draws = jax.random.uniform(key_of(step, seed), (length, batch_size))
    _, tokens = jax.lax.scan(follow, (first, first), draws)
    return tokens.T


def backcopy_chain(seed: Number, vocab_size: int = 64, triggers: int = 3, rate: float = 0.2) -> Float[Array, "V V"]:
    """The chain of `backcopy`: probabilities of the next token (last axis) after a token that is not a trigger.

    Other tokens follow with probabilities from a Dirichlet distribution of concentration 1/10, so that few are likely.
    No trigger follows the first token, which has no token before it to repeat.
    """
    drawn = jax.random.dirichlet(jax.random.key(seed), jnp.full(vocab_size - triggers - 1, 0.1), (vocab_size,))
    into_triggers = jnp.where(jnp.arange(vocab_size) == 0, 0.0, rate)[:, None]
    parts = [jnp.zeros((vocab_size, 1)), jnp.repeat(into_triggers / triggers, triggers, 1), drawn * (1 - into_triggers)]
    return jnp.concatenate(parts, axis=1)


class SigmoidAttention(nn.Module):
    """One causal head with weights σ(q·k / √D), which are not normalized over the keys."""

    @nn.compact
    def __call__(self, x, **_):
        """Apply the layer to `[B, T, F]`; D = F."""
        options = {"use_bias": False, "kernel_init": SMALL}
        q, k, v = (nn.Dense(x.shape[-1], name=name, **options)(x) for name in ("query", "key", "value"))
        weights = jnp.tril(jax.nn.sigmoid(q @ k.swapaxes(1, 2) / x.shape[-1] ** 0.5))
        self.sow("intermediates", "attention_weights", weights[:, None])
        return nn.Dense(x.shape[-1], name="out", **options)(weights @ v)


class Model(nn.Module):
    """Embedding, one block and an output layer; logits `[B, T, V]` of the next token."""

    condition: str

    @nn.compact
    def __call__(self, tokens):
        """Apply the model to int `[B, T]`."""
        if self.condition == SIGMOID:
            attention = SigmoidAttention(name="attention")
        else:
            options = {"mask": Causal(), "use_bias": False, "kernel_init": SMALL, "sinks": self.condition == SINK}
            attention = MultiHeadAttention(1, name="attention", **options)
        x = nn.Embed(VOCABULARY, WIDTH, embedding_init=SMALL)(tokens)
        x = x + LearnedPositions(LENGTH, WIDTH)(jnp.arange(tokens.shape[1]))
        x = Block(attention, Mlp(kernel_init=SMALL))(x)
        return nn.Dense(VOCABULARY, kernel_init=SMALL, name="output")(nn.LayerNorm()(x))


def measure(options: Options) -> list[dict]:
    """One row per seed, condition and look."""
    size = FAST if options.fast else FULL
    advance = options.progress(len(CONDITIONS) * size.seeds * size.steps)
    return [row for condition in CONDITIONS for row in _measure(condition, size, advance)]


def _measure(condition: str, size: Size, advance: Advance):
    model = Model(condition)
    look = jax.jit(jax.vmap(functools.partial(_look, model)))
    fitted = fit_seeds(
        **next_token(model),
        batches=lambda step, seed: backcopy(step, batch_size=BATCH, length=LENGTH + 1, seed=seed),
        optimizer=_sgd(size.steps) if condition == SGD else adamw(size.steps, 3e-3),
        seeds=range(size.seeds),
        looks=np.linspace(0, size.steps, size.looks).astype(int).tolist(),
        advance=advance,
    )
    for step, params in fitted:
        measured = jax.device_get(look(params, jnp.arange(size.seeds)))
        for seed in range(size.seeds):
            values = {name: float(value[seed]) for name, value in measured.items()}
            yield {"condition": condition, "seed": seed, "step": step} | values


def _sgd(steps: int) -> optax.GradientTransformation:
    """SGD with momentum 0.9, as in the authors' script; ten times their rate makes up for fewer updates."""
    return optax.sgd(optax.cosine_decay_schedule(0.3, steps), momentum=0.9)


def _look(model, params, seed) -> dict:
    """Measurements on held-out sequences, all scalars."""
    tokens = backcopy(TEST, batch_size=HELD_OUT, length=LENGTH + 1, seed=seed)
    inputs, place = tokens[:, :-1], jnp.arange(LENGTH)
    at_triggers = (inputs >= 1) & (inputs <= TRIGGERS)
    elsewhere = ~at_triggers & (place > 0)  # the first query has only one key
    is_value = lambda module, _: module.name == "value"  # noqa: E731
    _, sown = model.apply(params, inputs, capture_intermediates=is_value, mutable=["intermediates"])
    sown = sown["intermediates"]["attention"]
    (weights,), (values,) = sown["attention_weights"], sown["value"]["__call__"]
    weights, lengths = weights[:, 0], jnp.linalg.norm(values.reshape(HELD_OUT, LENGTH, -1), axis=-1)
    previous = jnp.where(place[:, None] - 1 == place, weights, 0).sum(-1)

    without = jax.tree.map(lambda leaf: leaf, params)
    without["params"]["attention"]["out"]["kernel"] *= 0.0
    chain = backcopy_chain(seed)
    oracle = jnp.where(at_triggers, 0.0, jax.scipy.special.entr(chain).sum(-1)[inputs])
    # Cross-entropy against the exact probabilities of the next token, not against the token that was drawn.
    exact = jnp.where(at_triggers[..., None], jax.nn.one_hot(tokens[:, 1:], VOCABULARY), chain[inputs])

    def excess(params):
        return -(exact * jax.nn.log_softmax(model.apply(params, inputs))).sum(-1) - oracle

    whole, headless = excess(params), excess(without)

    def over(name, chosen):
        def mean(x):
            return jnp.where(chosen, x, 0).sum() / chosen.sum()

        return {
            f"first, {name}": mean(weights[:, :, 0]),
            f"first of all, {name}": mean(weights[:, :, 0] / weights.sum(-1)),
            f"previous, {name}": mean(previous),
            f"uniform, {name}": mean(jnp.broadcast_to(1.0 / (place + 1), chosen.shape)),
            f"excess, {name}": mean(whole),
            f"worth, {name}": mean(headless - whole),
        }

    ratio = lengths[:, 0].mean() / lengths[:, 1:].mean()
    return over("triggers", at_triggers) | over("elsewhere", elsewhere) | {"value ratio": ratio}


def _at_end(rows, condition, name, step=None) -> list[float]:
    """A measurement of each seed after training, or after `step` updates."""
    step = max(row["step"] for row in rows) if step is None else step
    return [row[name] for row in rows if (row["condition"], row["step"]) == (condition, step)]


def judge(rows: list[dict]) -> Verdict:
    """Held if in every seed the trained head is dormant except at triggers, and only softmax needs a sink for this."""

    def of(name, condition=SOFTMAX, step=None):
        values = _at_end(rows, condition, name, step)
        return min(values), Interval.of(values), max(values)

    low, elsewhere, _ = of("first, elsewhere")
    _, triggers, high = of("first, triggers")
    least, previous, _ = of("previous, triggers")
    untrained, uniform = (of("first, elsewhere", step=0)[1].mean, of("uniform, elsewhere")[1].mean)
    needed, worth, _ = of("worth, triggers")
    _, worthless, most = of("worth, elsewhere")
    _, ratio, longest = of("value ratio")
    sink, sigmoid, sgd = (of("first, elsewhere", condition) for condition in (SINK, SIGMOID, SGD))
    learned = {name: of("excess, triggers", name)[1].mean for name in CONDITIONS}
    return Verdict.of(
        # One threshold everywhere: a sink has more than half of the weight.
        (
            low > 0.5,
            f"away from triggers the first token has {elsewhere:.2f} of the weight (untrained {untrained:.2f}, uniform "
            f"attention {uniform:.2f})",
        ),
        (
            least > 0.5 and high < 0.5,
            f"at triggers it has {triggers:.2f}, the previous token {previous:.2f}: the head is active",
        ),
        (
            needed > 10 * most,
            f"without the head the loss rises by {worth:.2f} nats at triggers, by {worthless:.2f} elsewhere",
        ),
        (
            longest < 0.5,
            f"the first token's value is {ratio:.2f} times as long as the others' (untrained "
            f"{of('value ratio', step=0)[1].mean:.2f})",
        ),
        (
            sink[2] < 0.5,
            f"with a sink logit the first token has {sink[1]:.2f} of the weight (loss above the oracle's at triggers: "
            f"{learned[SINK]:.2f} nats; without the logit {learned[SOFTMAX]:.2f})",
        ),
        (
            sigmoid[2] < 0.5,
            f"with a sigmoid its weight is {sigmoid[1]:.2f}, {of('first of all, elsewhere', SIGMOID)[1].mean:.2f} of "
            f"all weight ({learned[SIGMOID]:.2f} nats)",
        ),
        (sgd[2] < low, f"with SGD in place of Adam it is {sgd[1]:.2f} ({learned[SGD]:.2f} nats)"),
    )


def draw(rows: list[dict]) -> Figure:
    """Weight on the first token by training step, and the length of its value; bands: deviations over seeds.

    A sink forms when the weight away from triggers rises above the weight of uniform attention. Right, a ratio below
    1 means that the first token's value is shorter than other values, so that attending to it adds little.
    """

    def panel(names: dict, y: str):
        series, spread = {}, {}
        for label, (condition, name) in names.items():
            steps = sorted({row["step"] for row in rows})
            measured = [_at_end(rows, condition, name, step) for step in steps]
            series[label] = (steps, [np.mean(each) for each in measured])
            spread[label] = [np.std(each) for each in measured]
        return {"series": series, "spread": spread, "x": "step (updates)", "y": y}

    curves = {
        "away from triggers": "first, elsewhere",
        "at triggers": "first, triggers",
        "uniform": "uniform, elsewhere",
    }
    weight = panel({label: (SOFTMAX, name) for label, name in curves.items()}, "weight on the first token")
    others = panel(
        {condition: (condition, "first, elsewhere") for condition in CONDITIONS}, "weight away from triggers"
    )
    lengths = panel({condition: (condition, "value ratio") for condition in CONDITIONS}, "length over that of others")
    return plots.panels(
        {
            "softmax": weight | {"dashed": ("uniform",)},
            "and with other layers": others,
            "the first token's value": lengths,
        },
        judge(rows).title("Where a head has nothing to add, it attends to a first token without a value"),
        columns=3,
    )
