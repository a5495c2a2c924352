# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8 What attention learns, and when
#
# A loss curve that falls smoothly can hide sudden changes, and one that stands still can hide preparation. In this
# lesson you follow three small models through their training and look at what their heads do at each stage:
#
# 1. a model of Markov chains, which goes from guessing to counting tokens to counting pairs (Edelman et al. 2024);
# 2. a model of repeated texts, in which induction heads form within a few hundred steps (Olsson et al. 2022);
# 3. a model in which a head learns to do nothing, by attending to the first token (Guo et al. 2024).
#
# All three are studies of attnlab as well (`attnlab study markov`, `induction`, `sinks`), with several seeds and with
# controls. Here it is one seed each, and the inside of the models.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab import plots, see
from attnlab.data.tasks import TEST, backcopy, chains, repeats
from attnlab.study.fitting import adamw, fit_seeds, next_token
from attnlab.study.registry import load


def followed(model, batches, optimizer, looks):
    """Train a model to predict the next token, and keep its parameters at some steps: {step: params}."""
    fitted = fit_seeds(**next_token(model), batches=batches, optimizer=optimizer, seeds=[0], looks=looks)
    return {step: jax.tree.map(lambda leaf: leaf[0], params) for step, params in fitted}


induction, markov, sinks = map(load, ("induction", "markov", "sinks"))
# %% [markdown]
# ## 1 Counting
#
# Each sequence comes from a Markov chain of its own, with three states. Nobody can know its transitions beforehand;
# they have to be estimated from the sequence itself. There are three ways to predict the next state:
#
# - *uniform*: a third each;
# - *unigram*: by how often each state has occurred so far;
# - *bigram*: by how often each state has followed the current one. With one added to each count, this is what Bayes'
#   rule says for transitions drawn uniformly, and nothing can do better.

# %%
tokens = chains(TEST, batch_size=256, length=markov.LENGTH).tokens
oracles = markov.predictions(tokens)
print("a sequence:      ", *np.asarray(tokens[0, :24]))
for name, predicted in oracles.items():
    print(f"{name:8} at the end of it:", *(f"{p:.2f}" for p in predicted[0, -1]))

# %% [markdown]
# How far is a model from each of the three? We measure the KL divergence, in nats, through the training of a model of
# two layers, and of one layer.

# %%
STEPS = 600
looks = sorted({*range(0, STEPS // 2, 20), *range(STEPS // 2, STEPS + 1, 50)})


def chain_batches(step, seed):
    return chains(step, batch_size=markov.BATCH, length=markov.LENGTH, seed=seed).tokens


@jax.jit
def distances(said):
    """The divergence of predictions, logits `[B, T, 3]`, from each oracle."""
    return {name: markov.divergence(oracle, jax.nn.log_softmax(said)) for name, oracle in oracles.items()}


counting, divergence = {}, {}
for layers in (2, 1):
    model = markov.Model(layers)
    counting[layers] = followed(model, chain_batches, adamw(STEPS, 5e-3), looks)
    measured = [distances(jax.jit(model.apply)(params, tokens)) for params in counting[layers].values()]
    divergence[layers] = {name: np.array([float(each[name]) for each in measured]) for name in oracles}

final = {layers: float(curves["bigram"][-1]) for layers, curves in divergence.items()}
unigram_loss = float(markov.divergence(oracles["bigram"], jnp.log(oracles["unigram"])))
print(
    f"from bigrams, at the end: two layers {final[2]:.3f} nats, one layer {final[1]:.3f}; unigrams {unigram_loss:.3f}"
)
assert final[2] < 0.02 < 0.1 < final[1]
plots.panels(
    {
        "two layers" if layers == 2 else "one layer": {
            "series": {f"from {name}": (looks, curve) for name, curve in curves.items()},
            "x": "step (updates)",
            "y": "KL divergence (nats)",
            "markers": False,
        }
        for layers, curves in divergence.items()
    },
    f"Two layers stop at unigrams, then fall to bigrams within {final[2]:.3f} nats; one layer stays",
)

# %% [markdown]
# The model is near unigrams for a while, though the better solution is there to be found. What does attention do
# meanwhile? A head that counts pairs has to attend to the tokens that *followed* the current state: it is an induction
# head. For this the keys must know what came before them, which is the work of a previous-token head one layer below.
# `see.scores` measures both through time. With three states, a third of all keys have the right predecessor by chance.

# %%
two = markov.Model(2)


@jax.jit
def patterns(params):
    """The weights of both heads, `[2, B, 1, T, T]`."""
    return see.capture(two, params, tokens[:64]).stack("pattern")


role = {kind: [] for kind in ("previous", "induction")}
for params in counting[2].values():
    found = see.scores(patterns(params), np.asarray(tokens[:64]), list(role), null="uniform")
    role["previous"].append(found.values["previous"][0, 0])
    role["induction"].append(found.values["induction"][1, 0])
for kind, values in role.items():
    print(f"{kind:10} {values[0]:.2f} → {values[-1]:.2f}; uniform attention {found.uniform[kind]:.2f}")
    assert values[-1] > found.uniform[kind] + 0.2
fall = looks[int(np.argmax(divergence[2]["bigram"] < unigram_loss / 2))]
plots.lines(
    {"previous token, layer 0": (looks, role["previous"]), "induction, layer 1": (looks, role["induction"])},
    f"Both heads turn to their roles around step {fall}, where the loss falls",
    x="step (updates)",
    y="weight on the role's keys",
    markers=False,
)

# %% [markdown]
# ## 2 Copying
#
# Now each sequence is random tokens that repeat, with a period of its own. From the second period on every token can be
# predicted by copying what came after its first occurrence. The model is attention alone: two layers of four heads, or
# one layer with as many parameters. The accuracy is that on the tokens which can be predicted.

# %%
REPEATS = 700
text = induction.held_out(64)
stages = range(0, REPEATS + 1, 25)


def repeat_batches(step, seed):
    return repeats(
        step,
        batch_size=32,
        length=induction.LENGTH,
        vocab_size=induction.VOCABULARY,
        periods=induction.PERIODS,
        seed=seed,
    )


@jax.jit
def accuracy(logits):
    """The share of predictable tokens that are predicted."""
    hits = logits.argmax(-1) == text.tokens[:, 1:]
    return jnp.where(text.repeated, hits, 0).sum() / text.repeated.sum()


copying, accurate = {}, {}
for depth in (induction.TWO, induction.ONE):
    model = induction.gpt(depth)
    # Without decay of the rate and with decay of the weights, the heads form sooner.
    optimizer = optax.adamw(optax.linear_schedule(0, induction.LEARNING_RATE, 50), b2=0.99, weight_decay=0.1)
    copying[depth] = followed(model, repeat_batches, optimizer, stages)
    apply = jax.jit(model.apply)
    accurate[depth] = [float(accuracy(apply(params, text.tokens[:, :-1]))) for params in copying[depth].values()]
print(*(f"{depth}: {values[-1]:.0%} of the predictable tokens" for depth, values in accurate.items()), sep="\n")
assert accurate[induction.TWO][-1] > 0.9 and accurate[induction.ONE][-1] < 0.3

# %% [markdown]
# Two layers learn it, all at once; one layer does not. Which heads do it? The same scores as above, with null models
# now: uniform attention, the untrained model, and the same positions in other sequences.

# %%
deep, inputs = induction.gpt(induction.TWO), text.tokens[:32, :-1]


@jax.jit
def heads(params):
    """The weights of all heads, `[L, B, H, T, T]`."""
    return see.capture(deep, params, inputs).stack("pattern")


kinds = ("previous", "induction")
untrained = heads(copying[induction.TWO][0])
found = see.scores(heads(copying[induction.TWO][REPEATS]), inputs, kinds, untrained=untrained)
print(found)
inducing = [at for at in found.heads("induction") if found.values["induction"][at] > 0.3]
feeding = found.heads("previous")[0]
assert inducing and all(layer == 1 for layer, _ in inducing) and feeding[0] == 0
by_stage = {
    step: see.scores(heads(params), inputs, kinds, null="uniform") for step, params in copying[induction.TWO].items()
}
best = inducing[0]
plots.lines(
    {
        "accuracy, two layers": (stages, accurate[induction.TWO]),
        "accuracy, one layer": (stages, accurate[induction.ONE]),
        f"previous token, head {feeding[0]}.{feeding[1]}": (
            stages,
            [s.values["previous"][feeding] for s in by_stage.values()],
        ),
        f"induction, head {best[0]}.{best[1]}": (stages, [s.values["induction"][best] for s in by_stage.values()]),
    },
    "The previous-token head comes first, then induction and accuracy together",
    x="step (updates)",
    y="share",
    markers=False,
)

# %% [markdown]
# A pattern is no proof of use. Ablation is: in the place of each head's output put its mean, and see what accuracy is
# left. (More on ablation and patching in [lesson 7](7_seeing.md).)

# %%
predictable = text.tokens[:, :-1]
trained = copying[induction.TWO][REPEATS]
effects = {
    step: see.ablate(deep, copying[induction.TWO][step], predictable, accuracy) for step in (0, 200, 300, 400, REPEATS)
}
outputs = see.capture(deep, trained, predictable, want=("z",)).values["z"]
removed = np.zeros((2, induction.HEADS), bool)
removed[tuple(zip(*inducing))] = True
edits = {f"{path}/z": see.Mean(z, where=removed[layer][:, None]) for layer, (path, z) in enumerate(outputs.items())}
left = float(accuracy(see.edited(deep, trained, predictable, edits=edits).out))
print(f"accuracy {accurate[induction.TWO][-1]:.2f}; without the {len(inducing)} induction heads {left:.2f}")
assert left < accurate[induction.TWO][-1] - 0.5

# %% [markdown]
# Here is all of it on one page: choose a head, and move the slider through training. (On a site without scripts you see
# its picture.)

# %%
see.page(
    {step: see.capture(deep, copying[induction.TWO][step], inputs[:1]) for step in effects},
    [str(token) for token in inputs[0]],
    title="Two layers of attention learn to continue a repeated text",
    scores={step: by_stage[step] for step in effects},
    effects=effects,
)

# %% [markdown]
# ## 3 Doing nothing
#
# The weights of a softmax sum to one, so that a head cannot attend to nothing. What does it do where it has nothing to
# add? In this task most tokens follow from the one before them, which the MLP (the feed-forward layer) can learn by
# itself. After a *trigger*, though, comes the token before the trigger once more: there the head has to copy.

# %%
SINK_STEPS = 400
held_out = backcopy(TEST, batch_size=128, length=sinks.LENGTH)
at_trigger = np.asarray((held_out >= 1) & (held_out <= sinks.TRIGGERS))
elsewhere = ~at_trigger & (np.arange(sinks.LENGTH) > 0)  # the first token has but one key


def backcopy_batches(step, seed):
    return backcopy(step, batch_size=sinks.BATCH, length=sinks.LENGTH + 1, seed=seed)


moments = range(0, SINK_STEPS + 1, 40)
model = sinks.Model(sinks.SOFTMAX)
params_at = followed(model, backcopy_batches, adamw(SINK_STEPS, 3e-3), moments)
look = jax.jit(lambda params: see.capture(model, params, held_out, want=("pattern", "v")))
names = (
    "on the first token, at triggers",
    "on the first token, elsewhere",
    "on the token before, at triggers",
    "length",
)
shown = {name: [] for name in names}
for params in params_at.values():
    run = look(params)
    (pattern,), (v,) = (run.values[name].values() for name in ("pattern", "v"))
    first, before = (np.asarray(pattern[:, 0, :, 0]), np.diagonal(pattern[:, 0], offset=-1, axis1=1, axis2=2))
    lengths = np.linalg.norm(v[:, :, 0], axis=-1)
    shown[names[0]].append(first[at_trigger].mean())
    shown[names[1]].append(first[elsewhere].mean())
    shown[names[2]].append(before[at_trigger[:, 1:]].mean())
    shown[names[3]].append((lengths[:, 0] / lengths[:, 1:].mean(1)).mean())
for name, values in shown.items():
    print(f"{name:34} {values[0]:.2f} → {values[-1]:.2f}")
assert (
    shown[names[0]][-1] < 0.1 and shown[names[1]][-1] > 0.4 and shown[names[2]][-1] > 0.6 and shown["length"][-1] < 0.5
)
plots.panels(
    {
        "weight": {
            "series": {name: (moments, values) for name, values in shown.items() if name != "length"},
            "x": "step (updates)",
            "y": "mean weight",
            "markers": False,
        },
        "value of the first token": {
            "series": {"first token": (moments, shown["length"])},
            "x": "step (updates)",
            "y": "length over that of other tokens' values",
            "markers": False,
        },
    },
    "Where it has nothing to add, the head attends to a first token with a short value",
)

# %% [markdown]
# The first token is a *sink*: the queries with nothing to copy attend to it, and its value is so short that attending
# to it adds next to nothing. There the head is dormant. The study `sinks` asks what else would do: a learned logit
# without a value (`MultiHeadAttention(sinks=True)`), a sigmoid in place of the softmax, SGD in place of Adam.
#
# ## What to take home
#
# Attention learns in steps. A solution that one layer can express comes first; one that needs two heads to work
# together comes later and suddenly, for neither head is of use without the other. And what looks like a strong pattern,
# all that weight on the first token, can be a head at rest. The studies test these claims over several seeds, with
# controls: `attnlab study markov`, `attnlab study induction`, `attnlab study sinks`.
