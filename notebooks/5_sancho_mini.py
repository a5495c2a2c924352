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
# # 5 sancho-mini, and what is inside it
#
# In this lesson you will see how text becomes tokens, how a small GPT learns to write it character by character, and
# what is inside the trained model: what each head attends to, which gradients train Q, K, V and W, and what the
# embedding knows about letters. What a head does is measured, not assumed.
#
# The text is a file named by the environment variable `ATTNLAB_TEXT`, such as the Quijote, or by default the language
# reference that is part of every Python. The model is a smaller version of `configs/sancho.py`, trained for half a
# minute.

# %%
import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import attnlab
from attnlab import config as configs
from attnlab import plots, see
from attnlab.data import corpora, tokenizers
from attnlab.data.batches import EvalBatches
from attnlab.masks import Causal
from attnlab.nn import MultiHeadAttention, cosine_similarity, nearest
from attnlab.sample import generate
from attnlab.train import train
from attnlab.training import metrics
from attnlab.training import optimizer as optimizers
from attnlab.training import state as states

path = os.environ.get("ATTNLAB_TEXT", "")
corpus = corpora.read_text("text", path=path) if path else corpora.read_text("python_docs")
sentence = "En un lugar de la Mancha, de cuyo nombre no quiero acordarme"
if not path:
    sentence = "The class of an object is its type; the value may change"
print(f"{len(corpus.train):,} characters to train on, {len(corpus.validation):,} held out")

# %% [markdown]
# ## Text becomes tokens
#
# With words as tokens, sequences are short, but the vocabulary is unbounded, and words outside of it become `<unk>`.
# With characters or bytes nothing is unknown, but sequences are long. BPE (Sennrich et al. 2016) and WordPiece
# (Schuster & Nakajima 2012) are in between: frequent strings are single tokens, and rare words are split into pieces.
# All vocabularies are trained on this text.

# %%
learned_from = corpus.train[:200_000]
for kind in ("word", "wordpiece", "bpe", "char", "byte"):
    tokenizer = tokenizers.make(kind, learned_from, vocab_size=1000)
    ids = tokenizer.encode(sentence)
    pieces = "|".join(tokenizer.decode([i]) for i in ids)
    print(f"{kind:9} {len(ids):3} tokens of {tokenizer.vocab_size:5}: {pieces}")
    if kind != "word":
        assert tokenizer.decode(ids) == sentence

# %% [markdown]
# A larger vocabulary makes sequences shorter, with diminishing returns. (BPE includes the space before a word in its
# token; here WordPiece makes it a token of its own, and so needs more.)

# %%
sizes = [300, 500, 1000, 2000]
sample = learned_from[:20_000]
lengths = {"char": (sizes, [1000] * len(sizes))}
for kind in ("wordpiece", "bpe"):
    made = [tokenizers.make(kind, learned_from, size) for size in sizes]
    lengths[kind] = ([t.vocab_size for t in made], [len(t.encode(sample)) / 20 for t in made])
plots.lines(
    lengths,
    f"BPE with {sizes[-1]:,} tokens makes sequences {lengths['bpe'][1][-1] / 1000:.0%} as long as characters do",
    x="vocabulary (tokens)",
    y="length (tokens per 1,000 characters)",
    log="x",
    dashed=("char",),
)

# %% [markdown]
# ## Training
#
# This is the pipeline of `python -m attnlab.train`, with three blocks of four heads, width 96 and a context of 64
# characters. Everything else is the default of `attnlab/config.py`: rotary positions, normalised queries and keys,
# AdamW. Each character is a token, so the loss is in nats per character.

# %%
config = configs.default()
config.data.path = path
config.steps, config.batch_size = 300, 16
config.model.update(num_layers=3, width=96)
config.optimizer.warmup_steps = 30
config.eval.update(every=100, windows=128)
config.checkpoint.update(every=100, keep=4)
config.log.update(every=25, tensorboard=False)
config.sample.length = 200
config.parallel.mesh.data = 1

workdir = Path(tempfile.mkdtemp()) / "sancho-mini"
assert train(config, workdir) == 0

# %% [markdown]
# To judge a loss you need baselines. Predicting from character frequencies gives the entropy of a single character;
# predicting from the previous character gives the conditional entropy. Attention uses more context than that.

# %%
records = metrics.read(workdir / "metrics.jsonl")
final = records[-1]["loss"]
tokenizer = tokenizers.load(workdir / "tokenizer.json")
ids, held_out = tokenizer.encode(corpus.train), tokenizer.encode(corpus.validation)
pairs = np.zeros((tokenizer.vocab_size,) * 2) + 0.01
np.add.at(pairs, (ids[:-1], ids[1:]), 1)
single, follows = pairs.sum(axis=0) / pairs.sum(), pairs / pairs.sum(axis=1, keepdims=True)
guesses = {
    "uniform": np.log(tokenizer.vocab_size),
    "character frequencies": -np.log(single[held_out]).mean(),
    "the previous character": -np.log(follows[held_out[:-1], held_out[1:]]).mean(),
    "sancho-mini": final,
}
for name, nats in guesses.items():
    print(f"{name:24}{nats:.2f} nats per character")
plots.training(
    {"sancho-mini": records},
    f"In {config.steps} steps the validation loss falls to {final:.2f} nats per character",
    y="loss (nats per character)",
)

# %% [markdown]
# ## Generating text
#
# `attnlab.load` returns the model, parameters, tokenizer and config of a run. `generate` draws one token after another,
# with a cache of keys and values. At temperature 0 it takes the most likely token, which must agree with a single pass
# over the full prompt.

# %%
model, params, tokenizer, config = attnlab.load(workdir)
prompt = tokenizer.encode(sentence.split(",")[0].split(";")[0])
likeliest = next(generate(model, params, prompt, 1, temperature=0))
assert likeliest[0] == model.apply(params, prompt[None])[0, -1].argmax()
drawn = generate(model, params, prompt, 300, temperature=0.7, seed=1)
print(tokenizer.decode(prompt) + tokenizer.decode([token[0] for token in drawn]))

# %% [markdown]
# ## What every head attends to
#
# `see.capture` runs the model and returns the weights of every attention layer (lesson 7 goes further). Here are all
# twelve heads on four words.

# %%
names = [f"layer {layer}, head {head}" for layer in range(3) for head in range(4)]


@jax.jit
def patterns(params, tokens):
    """The weights of every head, `[L, B, H, T, T]`."""
    return see.capture(model, params, tokens).stack("pattern")


words = " ".join(sentence.split()[:4])
looks = jnp.concatenate(patterns(params, tokenizer.encode(words)[None])[:, 0])  # [12, T, T]
np.testing.assert_allclose(looks.sum(axis=-1), 1, atol=1e-5)
nearby = np.mean([looks[:, i, i - 2 : i + 1].sum(axis=-1) for i in range(5, len(words))])
plots.heads(
    looks,
    f"From the sixth character on, {nearby:.0%} of the weight is on the character itself and the two before it",
    tokens=list(words.replace(" ", "_")),
    mask=Causal(),
    names=names,
)

# %% [markdown]
# ## Measured: which head does what?
#
# Lecture notes often claim that particular heads have particular roles (document 000 names verbs and subjects,
# adjectives and nouns, quotation marks). Testing this for verbs and subjects would take annotated sentences and a model
# that knows words. What we can measure here is the mean weight that each head gives to certain positions, over 64
# held-out windows. "Uniform" is a head that spreads its weight evenly over all visible characters; only a clear excess
# over it is a finding.

# %%
batch = EvalBatches(held_out, context=64, batch_size=64, windows=64)[0]
inputs = batch.tokens[:, :-1]
characters = np.array([list(tokenizer.decode(row)) for row in inputs])
i = np.broadcast_to(np.arange(64), inputs.shape)
letter = np.char.isalnum(characters)
last_gap = np.maximum.accumulate(np.where(letter, -1, i), axis=1)  # the nearest non-letter, at or before i
late = i >= 8
in_word = late & letter & (last_gap >= 0) & (i - last_gap >= 4)  # at least three letters before it
places = {
    "itself": (i, late),
    "1 back": (i - 1, late),
    "2 back": (i - 2, late),
    "3 back": (i - 3, late),
    "word's first letter": (last_gap + 1, in_word),
    "gap before the word": (last_gap, in_word),
    "start of the window": (0 * i, late),
}
weights = np.asarray(patterns(params, inputs))
uniform = np.where(np.tri(64), 1 / (1 + np.arange(64)[:, None]), 0)
all_heads = np.concatenate([*weights, np.broadcast_to(uniform, (64, 1, 64, 64))], axis=1)
measured = {
    name: np.mean([all_heads[row, :, at, key[row, at]] for row, at in zip(*np.nonzero(counted))], axis=0)
    for name, (key, counted) in places.items()
}
for name, of_heads in measured.items():
    best = of_heads[:-1].argmax()
    print(f"{name:20} most in {names[best]}: {of_heads[best]:.2f}, uniform {of_heads[-1]:.2f}")
top = max(measured, key=lambda name: measured[name][:-1].max())
plots.weights(
    np.stack(list(measured.values()), axis=1),
    f"The largest mean weight of any head is {measured[top].max():.2f}, on '{top}'",
    queries=[*names, "uniform"],
    keys=list(measured),
    label="mean weight",
    x="position attended to",
    y="head",
)

# %% [markdown]
# There are heads for the character itself and for the previous one. A head that "finds the beginning of words" would
# stand out in the columns of the word's first letter or of the gap before it; in a run this short, none gives them even
# a third of its weight. Train longer, and measure again.
#
# For roles that need no words, `see.scores` does this, with tests against uniform attention, untrained heads and, for
# roles that depend on the characters, the same pair of positions in other windows. An induction head attends to what
# followed an earlier occurrence of the current character.

# %%
untrained = patterns(jax.jit(model.init)(jax.random.key(1), inputs[:1]), inputs)
found = see.scores(weights, inputs, ("current", "previous", "induction"), untrained=untrained)
print(found)
for kind in found.values:
    print(f"{kind}: {len(found.heads(kind))} of {len(names)} heads reject all null models")
by_hand = np.diagonal(weights, offset=-1, axis1=3, axis2=4).mean(axis=(1, 3))  # [L, H]
np.testing.assert_allclose(found.values["previous"], by_hand, atol=1e-5)

# %% [markdown]
# A small p-value says that an excess is real, not that it is large, and neither says that the model uses the head.
# Lesson 7 tests that by ablation.

# %% [markdown]
# ## How are Q, K, V and W trained?
#
# Document 004 leaves that question open. The answer is the chain rule: the loss is differentiated through every
# product, and each matrix is updated against its own gradient. For one head, $S = QK^\top/\sqrt{d}$, $P =
# \text{softmax}(S)$, $O = PV$, $Y = OW$, with $G$ the gradient of $Y$:
#
# $$dW = O^\top G, \quad dO = G W^\top, \quad dV = P^\top dO, \quad dS_{ij} = P_{ij}\,(dO_i \cdot (V_j - O_i)), \quad
# dQ = dS\, K/\sqrt d, \quad dK = dS^\top Q/\sqrt d$$
#
# and $dW_Q = X^\top dQ$, likewise for K and V. By hand, and with `jax.grad` through attnlab's module:

# %%
x, target = jax.random.normal(jax.random.key(0), (2, 6, 8))
one_head = MultiHeadAttention(num_heads=1, head_dim=4, use_bias=False, mask=Causal())
variables = jax.jit(one_head.init)(jax.random.key(1), x[None])


def half_squares(variables):
    return 0.5 * ((one_head.apply(variables, x[None])[0] - target) ** 2).sum()


by_jax = jax.tree.map(jnp.squeeze, jax.jit(jax.grad(half_squares))(variables)["params"])
wq, wk, wv, w = (variables["params"][name]["kernel"].squeeze() for name in ("query", "key", "value", "out"))
q, k, v = x @ wq, x @ wk, x @ wv
p = jax.nn.softmax(jnp.where(np.tri(6, dtype=bool), q @ k.T / 2, -jnp.inf), axis=1)
o = p @ v
g = o @ w - target
do = g @ w.T
ds = p * (do @ v.T - (do * o).sum(axis=1, keepdims=True))
by_hand = {"query": x.T @ ds @ k / 2, "key": x.T @ ds.T @ q / 2, "value": x.T @ p.T @ do, "out": o.T @ g}
for name, gradient in by_hand.items():
    np.testing.assert_allclose(gradient, by_jax[name]["kernel"], atol=1e-5)
    print(f"{name:6} gradient of norm {jnp.linalg.norm(gradient):.2f}")

# %% [markdown]
# Consider $dS$: a score learns only from how much a value differs from the weighted mean of the visible values. As long
# as the values are similar, it hardly matters which keys a head attends to, and the gradients of Q and K are small.
# Here is sancho-mini from its initial parameters (the same seed gives the same bits) to its final ones, on the 64
# windows from above.

# %%
loss_and_gradient = jax.jit(jax.value_and_grad(lambda params: states.token_losses(model, params, batch).mean()))
first = states.create(model, optimizers.make(config.optimizer, config.steps), config.seed).params
saved = {0: first} | {step: attnlab.load(workdir, step).params["params"] for step in (100, 200)}
saved[config.steps] = params["params"]
matrices = {"Q": "query", "K": "key", "V": "value", "W": "out"}


def norm(tree, matrix):
    """The norm of one kind of matrix over all layers."""
    kernels = [tree[f"block_{layer}"]["attention"][matrices[matrix]]["kernel"] for layer in range(3)]
    return float(jnp.linalg.norm(jnp.stack([jnp.linalg.norm(kernel) for kernel in kernels])))


steps = list(saved)
gradients = {step: loss_and_gradient(tree)[1] for step, tree in saved.items()}
changes = {step: jax.tree.map(jnp.subtract, tree, first) for step, tree in saved.items()}
sizes = {name: [norm(gradients[step], name) for step in steps] for name in matrices}
for at, step in ((0, "first"), (-1, "last")):
    print(f"{step:5} step: gradient of", ", ".join(f"{name} {sizes[name][at]:.3f}" for name in matrices))
plots.panels(
    {
        f"W's gradient over Q's: {sizes['W'][0] / sizes['Q'][0]:.0f} at the start, "
        f"{sizes['W'][-1] / sizes['Q'][-1]:.1f} at the end": {
            "series": {name: (steps, sizes[name]) for name in matrices},
            "x": "step (updates)",
            "y": "norm of the gradient (nats per unit)",
            "log": "y",
        },
        "Adam divides by the gradient's size, so all four change": {
            "series": {name: (steps, [norm(changes[step], name) for step in steps]) for name in matrices},
            "x": "step (updates)",
            "y": "distance from the start (norm)",
        },
    },
    "V and W get the larger gradients, but Q and K change as well",
)

# %% [markdown]
# A small gradient does not mean a small step: Adam divides each by its own size. Here Q and K move even further than V
# and W, because queries and keys are normalised afterwards, which leaves the norm of these matrices free to grow.

# %% [markdown]
# ## What the embedding knows
#
# Two characters are similar when the cosine of their vectors, $u \cdot v / (\|u\| \|v\|)$, is near 1. The model was
# never told what a vowel is.

# %%
number = {character: n for n, character in enumerate(tokenizer.characters)}
common = [c for c in tokenizer.characters if np.count_nonzero(ids == number[c]) >= 500]


def vectors(characters, tree=params["params"]):
    """The embeddings of characters, `[characters, width]`."""
    return tree["embed"]["embedding"][jnp.array([number[c] for c in characters])]


shown = [c for c in "aeiourntAE.," if c in common]
neighbours, cosines = nearest(vectors(common), jnp.array([common.index(c) for c in shown]), count=4)
for c, near, cosine in zip(shown, neighbours, cosines):
    print(f"{c}  is close to", "  ".join(f"{common[n]!r} {similarity:.2f}" for n, similarity in zip(near, cosine)))

# %%
kinds = {
    "vowels": [c for c in "aeiou" if c in common],
    "consonants": [c for c in "bcdfghjklmnpqrstvwxyz" if c in common],
    "capitals": [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c in common],
    "marks": [c for c in common if not c.isalnum() and not c.isspace()],
}
ordered = [c for kind in kinds.values() for c in kind]
plots.weights(
    cosine_similarity(vectors(ordered), vectors(ordered)),
    "Blocks on the diagonal: vowels are similar to vowels, capitals to capitals",
    queries=ordered,
    x="character",
    y="character",
    label="cosine similarity",
)

# %% [markdown]
# Averaged over groups, and through training:


# %%
def alike(step, group, others):
    """The mean cosine between the characters of two groups."""
    cosine = cosine_similarity(vectors(group, saved[step]), vectors(others, saved[step]))
    return np.mean([cosine[i, j] for i, a in enumerate(group) for j, b in enumerate(others) if a != b])


vowels, consonants, capitals, _ = kinds.values()
groups = {
    "vowel, vowel": (vowels, vowels),
    "vowel, consonant": (vowels, consonants),
    "capital, capital": (capitals, capitals),
    "capital, small letter": (capitals, vowels + consonants),
}
similar = {name: [alike(step, *pair) for step in steps] for name, pair in groups.items()}
own = np.mean([cosine_similarity(*vectors([c, c.lower()])) for c in capitals if c.lower() in common])
print(f"a capital and its own small letter: {own:.2f}")
plots.lines(
    {name: (steps, values) for name, values in similar.items()},
    f"Mean similarity after training: {similar['vowel, vowel'][-1]:.2f} between two vowels, "
    f"{similar['vowel, consonant'][-1]:.2f} between a vowel and a consonant",
    x="step (updates)",
    y="mean cosine similarity",
)

# %% [markdown]
# Vowels are similar to vowels, and capitals to capitals. A capital and its own small letter are not similar, although
# to us they are the same letter. The model knows characters by their contexts, not by sound or shape: characters that
# can appear in the same places are similar.
