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
# # 7 Seeing: look inside a model
#
# A heat map of attention invites a story: this head does that. But a pattern is no proof of use: a head may attend to a
# place and change nothing. In this lesson you train a small model that learns one mechanism, induction heads, and
# examine it with `attnlab.see` in four steps: capture patterns, score them against null models, ablate heads, and patch
# values from one run into another. At the end you know which head feeds which, and how much each adds to the
# prediction.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab import plots, see
from attnlab.data.tasks import repeats
from attnlab.nn import GPT

VOCAB, LENGTH, LAYERS, HEADS = 64, 48, 2, 4

# %% [markdown]
# ## A model with a mechanism
#
# The tokens are random, but each sequence repeats itself, with a period between 12 and 24 tokens. The first period
# cannot be predicted. From the second on, there is a rule: find the earlier occurrence of the current token, and copy
# the token that followed it. As each sequence has its own period, attending a fixed distance back does not work. Two
# layers of four heads learn the rule in 500 steps; a checkpoint is kept every 50.

# %%
model = GPT(VOCAB, num_layers=LAYERS, num_heads=HEADS, width=64, context=LENGTH, positions="rotary", mlp_ratio=1)
optimizer = optax.adamw(optax.linear_schedule(0, 3e-3, 50), b2=0.99, weight_decay=0.1)


@jax.jit
def initial(seed):
    """The parameters of an untrained model."""
    return model.init(jax.random.key(seed), jnp.zeros((1, 2), int))


@jax.jit
def step(params, state, tokens):
    def loss(params):
        return model.apply(params, tokens[:, :-1], targets=tokens[:, 1:]).mean()

    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


params = initial(1)
state, checkpoints = optimizer.init(params), {0: params}
for done in range(1, 501):
    params, state = step(params, state, repeats(done - 1, batch_size=64, length=LENGTH, vocab_size=VOCAB, seed=1))
    if done % 50 == 0:
        checkpoints[done] = params

# %% [markdown]
# We measure on 128 new texts: 24 different tokens, twice. In the first half, the best possible loss is $\ln 64 = 4.16$
# nats or a little less. Towards its end the loss even rises above that, as the model expects the repetition to begin,
# and is wrong. In the second half it falls close to zero.

# %%
draw = np.random.default_rng(0)
half = draw.permuted(np.tile(np.arange(VOCAB), (128, 1)), axis=1)[:, : LENGTH // 2]
texts = np.concatenate([half, half], axis=1)
followers = np.roll(texts, -1, axis=1)  # the next token; the last one's is the first again


def losses(logits):
    """The loss at each position, nats `[B, T]`."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), followers[..., None], axis=-1)[..., 0]


def second_half(logits):
    return losses(logits)[:, LENGTH // 2 :].mean()


by_position = {"as trained": losses(model.apply(params, texts)).mean(axis=0)}
first, second = by_position["as trained"].reshape(2, -1).mean(axis=1)
print(f"first half {first:.2f}, second half {second:.2f} nats per token; ln {VOCAB} = {np.log(VOCAB):.2f}")
assert first > 4 and second < 0.5

# %% [markdown]
# ## Capture
#
# `see.sites` lists the attention layers of a model, and checks that the patterns it finds are those that the model
# computes with. `see.capture` returns them. Nothing in the model was prepared for this. Here are all heads on one text:

# %%
print(see.sites(model, params, texts))


@jax.jit
def patterns(params, tokens):
    """The attention weights of all heads, `[L, B, H, T, T]`."""
    return see.capture(model, params, tokens).stack("pattern")


plots.atlas(
    patterns(params, texts[:1])[:, 0],
    "Layer 0 attends nearby; heads of layer 1 to the token after the current one's first occurrence",
    causal=True,
)

# %% [markdown]
# ## Scores and null models
#
# An *induction head* attends to the token after an earlier occurrence of the current one; a *previous-token head* to
# the token before (Olsson et al. 2022). The score is the mean weight there, over all queries that have such a key. Any
# head has some weight there. So each score comes with p-values against three null models: uniform attention, the same
# model untrained, and, for roles that depend on tokens, the same pair of positions in other texts. The last one needs
# texts with different periods; these were not trained on.

# %%
varied = repeats(1_000_000, batch_size=32, length=LENGTH, vocab_size=VOCAB)
untrained = jnp.concatenate([patterns(initial(seed), varied) for seed in range(4)], axis=2)
kinds = ("previous", "induction", "duplicate", "current")
found = see.scores(patterns(params, varied), varied, kinds, untrained=untrained)
print(found)
print("\nlayer.head  ", *(f"{kind:>10}" for kind in kinds))
for at in np.ndindex(LAYERS, HEADS):
    marks = ("*" if at in found.heads(kind) else " " for kind in kinds)
    print(f"{at[0]}.{at[1]}         ", *(f"{found.values[kind][at]:9.2f}{mark}" for kind, mark in zip(kinds, marks)))
print("* all null models rejected, p < 0.01 after Bonferroni's correction")

feeder = found.heads("previous")[0]
induction = [at for at in found.heads("induction") if found.values["induction"][at] > 0.5]
assert feeder[0] == 0 and induction and all(layer == 1 for layer, _ in induction)


def name(at):
    return f"{at[0]}.{at[1]}"


# %% [markdown]
# Both kinds of heads appear together, within some hundred steps, and the loss of the second half falls with them. The
# next sections test whether they are the cause.

# %%
steps = list(checkpoints)
by_step = {s: see.scores(patterns(tree, varied), varied, ("previous", "induction")) for s, tree in checkpoints.items()}
loss_of = jax.jit(lambda params: second_half(model.apply(params, texts)))
curve = np.array([loss_of(tree) for tree in checkpoints.values()])
rising = np.array([by_step[s].values["induction"][induction[0]] for s in steps])
assert np.corrcoef(curve, rising)[0, 1] < -0.9
plots.panels(
    {
        "loss of the second half": {
            "series": {"model": (steps, curve)},
            "x": "step (updates)",
            "y": "loss (nats per token)",
        },
        "weight on the role's key": {
            "series": {
                f"previous token, head {name(feeder)}": (steps, [by_step[s].values["previous"][feeder] for s in steps]),
                f"induction, head {name(induction[0])}": (steps, rising),
            },
            "x": "step (updates)",
            "y": "score",
        },
    },
    "The loss falls when both kinds of heads form",
)

# %% [markdown]
# ## Ablate
#
# Does the model use these heads? `see.ablate` replaces the output z of one head at a time by its mean over all texts
# and positions, and returns the metric without that head, for all heads in one compiled program.

# %%
ablated = see.ablate(model, params, texts, second_half)
cost = ablated.change
plots.effects_grid(
    cost,
    f"Without head {name(feeder)} the loss of the second half rises by {cost[feeder]:.2f} nats",
    label="change (nats)",
)

# %% [markdown]
# Compare the scores. Several heads of layer 0 are previous-token heads by every test, but one of them can be ablated
# at no cost. The score says where a head attends, not what is done with what it moves.

# %%
idle = min(found.heads("previous"), key=lambda at: abs(cost[at]))
for at in (feeder, idle):
    p = max(found.p[null]["previous"][at] for null in ("uniform", "untrained"))
    score = found.values["previous"][at]
    print(f"head {name(at)}: previous-token score {score:.2f}, p = {p:.0e}; without it {cost[at]:+.3f} nats")
assert abs(cost[idle]) < cost[0].max() / 4

# %% [markdown]
# The induction heads do the same job, so that ablating one of them leaves the others to do it. Without all of them at
# once, the drop of the loss is gone. For such an edit there is `see.edited`:

# %%
z = see.capture(model, params, texts, want=("z",)).values["z"]


@jax.jit
def without(removed):
    """The loss by position without heads `[L, H]`."""
    edits = {
        f"{path}/z": see.Mean(values, where=removed[layer][:, None]) for layer, (path, values) in enumerate(z.items())
    }
    return losses(see.edited(model, params, texts, edits=edits).out).mean(axis=0)


for label, removed in {
    f"without {', '.join(map(name, induction))} (induction)": induction,
    f"without {name(feeder)} (previous token)": [feeder],
    f"without {name(idle)} (previous token too)": [idle],
}.items():
    gate = np.zeros((LAYERS, HEADS), bool)
    gate[tuple(zip(*removed))] = True
    by_position[label] = without(gate)
seconds = {label: float(values[LENGTH // 2 :].mean()) for label, values in by_position.items()}
for label, value in seconds.items():
    print(f"{label:40} {value:.2f} nats per token in the second half")
_, lesion, unfed, spared = seconds.values()
np.testing.assert_allclose(unfed - seconds["as trained"], cost[feeder], atol=1e-3)
assert lesion > np.log(VOCAB) / 2 and cost[tuple(zip(*induction))].sum() < lesion - second and spared < lesion / 2
plots.lines(
    {label: (np.arange(LENGTH), values) for label, values in by_position.items()},
    f"Without the induction heads the second half costs {lesion:.2f} nats in place of {second:.2f}",
    x="position (tokens)",
    y="loss (nats per token)",
    markers=False,
)

# %% [markdown]
# ## Patch
#
# Ablation says that a head matters, not for what. Activation patching asks a narrower question (Meng et al. 2022). We
# take pairs of runs that differ in one token. The *clean* text ends at position 40, on a token A whose first occurrence
# was followed by B. In the *corrupt* text that first A is another token, so that B follows no A. Then one head's output
# is taken from the clean run into the corrupt one. How much of the log-probability of B comes back?
#
# `see.patch` runs the model once per head. `see.attribute` estimates the same for all heads by a single gradient, which
# is cheap for large models (Nanda 2023) and exact only for linear ones.

# %%
last = 40
early = last - LENGTH // 2
clean = texts[:64, : last + 1]
corrupt, b = clean.copy(), clean[:, early + 1]
corrupt[:, early] = [np.setdiff1d(np.arange(VOCAB), text)[0] for text in clean]  # a token that the text lacks


def log_probability(logits):
    """Mean log-probability of B at the last position."""
    return jax.nn.log_softmax(logits[:, -1])[jnp.arange(64), b].mean()


patched = see.patch(model, params, clean, corrupt, log_probability)
estimated = see.attribute(model, params, clean, corrupt, log_probability)
print(f"log-probability of B: clean {patched.target:.2f}, corrupt {patched.baseline:.2f} nats")
best = np.unravel_index(patched.recovered.argmax(), (LAYERS, HEADS))
agreement = np.corrcoef(patched.recovered.ravel(), estimated.recovered.ravel())[0, 1]
assert patched.recovered[best] > 0.5 and agreement > 0.5
assert estimated.recovered[0].max() < patched.recovered[0].max()
labels = [name(at) for at in np.ndindex(LAYERS, HEADS)]
plots.lines(
    {
        "patched": (labels, patched.recovered.ravel()),
        "attributed, by one gradient": (labels, estimated.recovered.ravel()),
    },
    f"Head {name(best)} alone brings back {patched.recovered[best]:.0%}; estimates correlate by {agreement:.2f}",
    x="head (layer.head)",
    y="share recovered",
)

# %% [markdown]
# The estimates for layer 0 are too low: their effect passes through the softmax of layer 1, whose gradient is small
# while B has hardly any weight. Use attribution to find candidates, and patch those.

# %% [markdown]
# ## Which head feeds which?
#
# The heads of layer 1 attend to B, and to find it they must know that A came before B. That is what the previous-token
# head could write at the position of B. If so, its effect passes through the *keys* of the induction heads, which is
# called K-composition (Elhage et al. 2021). `see.paths` measures it: the sender's output is that of the corrupt run,
# and the change reaches one input of one receiver alone; all other heads stay as in the clean run.

# %%
into = {
    value: see.paths(model, params, clean, corrupt, log_probability, senders=[0], receivers=[1], into=value).change
    for value in ("q", "k", "v")
}
into = {value: change[0, :, 0] for value, change in into.items()}  # [H of layer 0, H of layer 1]
for value, change in into.items():
    sender, receiver = np.unravel_index(change.argmin(), change.shape)
    print(f"through {value}: at most {change.min():+.3f} nats, from 0.{sender} to 1.{receiver}")
strongest = np.unravel_index(into["k"].argmin(), into["k"].shape)
assert (0, strongest[0]) in found.heads("previous") and (1, strongest[1]) in induction
assert into["k"].min() < 3 * min(into["q"].min(), into["v"].min())
plots.effects_grid(
    into["k"],
    f"Through the keys of layer 1, head 0.{strongest[0]} feeds induction head 1.{strongest[1]}",
    layers=[f"from 0.{head}" for head in range(HEADS)],
    label="change (nats)",
)

# %% [markdown]
# A single path costs little, as the other induction heads still find B. If all heads of layer 1 get the keys of the
# corrupt run at once, B is lost. The values matter far less, and the queries of the last position are the same.

# %%
lost = {}
for value in ("q", "k", "v"):
    frozen = see.Freeze(see.capture(model, params, corrupt, want=(value,)))
    out = see.edited(model, params, clean, edits={f"block_1/attention/{value}": frozen}).out
    lost[value] = float(patched.target - log_probability(out))
    print(f"all {value} of layer 1 from the corrupt run: {-lost[value]:+.2f} nats")
assert lost["k"] > 3 * lost["v"] and abs(lost["q"]) < 0.1

# %% [markdown]
# ## From the stream to the logits
#
# Each block adds to the residual stream. The *logit lens* (nostalgebraist 2020) decodes the stream after each block as
# if it were the last, so that one sees where the prediction is made: here in layer 1, all at once.

# %%
decoded = [-losses(logits)[:, LENGTH // 2 : -1].mean() for logits in see.lens(model, params, texts)]
for place, value in zip(("the embedding", "layer 0", "layer 1"), decoded):
    print(f"log-probability of the next token after {place:13} {value:7.2f} nats")
assert decoded[1] < -np.log(VOCAB) < decoded[2]

# %% [markdown]
# As the stream is a sum, so is each logit: with the divisor of the last norm held fixed, every head and every
# feed-forward layer (MLP) adds its own part, and the parts sum to the logit.

# %%
parts = see.contributions(model, params, texts, targets=followers)
np.testing.assert_allclose(parts.total, parts.logits, atol=1e-4)
parts_of = {"embedding": parts.embedding}
for layer in range(LAYERS):
    parts_of |= {name((layer, head)): parts.heads[layer, head] for head in range(HEADS)}
    parts_of |= {f"MLP {layer}": parts.blocks[layer]}
halves = {
    "first half": [float(part[:, : LENGTH // 2 - 1].mean()) for part in parts_of.values()],
    "second half": [float(part[:, LENGTH // 2 : -1].mean()) for part in parts_of.values()],
}
direct = sum(halves["second half"][list(parts_of).index(name(at))] for at in induction)
logit = float(parts.logits[:, LENGTH // 2 : -1].mean())
amplified = halves["second half"][-1]
print(f"of a logit of {logit:.2f}, {direct:.2f} come from the induction heads, {amplified:.2f} from the MLP of layer 1")
assert direct + amplified > 0.8 * logit and abs(parts.heads[0].mean(axis=(1, 2))).max() < 0.5
plots.lines(
    {half: (list(parts_of), values) for half, values in halves.items()},
    "The induction heads and the MLP after them raise the next token's logit; the heads of layer 0 do not",
    x="part of the model",
    y="logit of the next token",
)

# %% [markdown]
# The heads of layer 0 add next to nothing to the logit directly, and yet without what they write into the keys the
# answer is lost. Direct contributions show what writes the answer; ablation and paths show what is needed for it.

# %% [markdown]
# ## All of it on one page
#
# `see.page` shows patterns, scores and effects, with a slider over checkpoints: in a notebook as below, or with `path=`
# as one HTML file that works offline and that you can send to others. (On a site without scripts you see its picture.)

# %%
shown = [0, 300, 350, 400, 500]
see.page(
    {s: see.capture(model, checkpoints[s], texts[:1]) for s in shown},
    [str(token) for token in texts[0]],
    title="Induction heads form in layer 1 while layer 0 learns to attend to the previous token",
    scores={s: by_step[s] for s in shown},
    effects={s: see.ablate(model, checkpoints[s], texts, second_half) for s in shown},
)

# %% [markdown]
# ## Any model
#
# None of this needs attnlab's layers. Here is a model of Flax's own, and one function of plain JAX; both are captured
# as they are. The checks are by hand: the output is unchanged, the pattern is the softmax of $qk^\top/\sqrt d$, and
# pattern times v is z.


# %%
class Plain(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, 32)(tokens)
        for _ in range(2):
            x += nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        return nn.Dense(VOCAB)(x)


plain = Plain()
variables = jax.jit(plain.init)(jax.random.key(0), texts[:2])
print(see.sites(plain, variables, texts[:2]))
run = see.capture(plain, variables, texts[:2], want=("q", "k", "v", "pattern", "z"))
np.testing.assert_allclose(run.out, plain.apply(variables, texts[:2]), atol=1e-6)
for path in run.paths("pattern"):
    q, k, v, pattern, z = (run.values[value][path] for value in ("q", "k", "v", "pattern", "z"))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    by_hand = jax.nn.softmax(jnp.where(np.tri(LENGTH, dtype=bool), logits, -jnp.inf))
    np.testing.assert_allclose(pattern, by_hand, atol=1e-6)
    np.testing.assert_allclose(z, jnp.einsum("bhqk,bkhd->bqhd", pattern, v), atol=1e-6)


def attend(weights, x):
    pattern = jax.nn.softmax(jnp.where(np.tri(x.shape[1], dtype=bool), x @ weights @ x.swapaxes(1, 2), -jnp.inf))
    return pattern @ x


x = jax.random.normal(jax.random.key(1), (2, 5, 8))
run = see.capture(attend, jnp.eye(8), x)
(pattern,) = run.values["pattern"].values()
np.testing.assert_allclose(pattern.reshape(2, 5, 5) @ x, attend(jnp.eye(8), x), atol=1e-6)
print("a plain function:", *run.paths("pattern"), pattern.shape)

# %% [markdown]
# This model is small and its task artificial, so that the answer could be checked at each step. In a language model,
# expect heads with several roles, and backup heads that take over when one is ablated (Wang et al. 2022). The order
# stays the same: patterns suggest a role, null models test it, and edits show whether the model uses it.
