"""Some head links verbs with subjects, some adjectives with nouns, and some finds where a quotation began.

Document 000 claims this of a character GPT. Pairs are found in held-out text with regular expressions (Spanish or
English, depending on the text): the characters of a pair's later part are the queries, those of the earlier part the
keys. A head's score is its weight on these keys, relative to the weight at as many control places drawn from the text,
with the same distances and the same character classes at the edges (word, white space, punctuation) but without that
role. So a head that attends to the previous word, whatever it is, scores 1. The p-value of the difference
(Mann-Whitney) is multiplied by the number of heads and roles tried (Bonferroni). A role counts as found if, in every
seed, some head has twice the control's weight with a p-value below 1 %.
"""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from scipy.stats import mannwhitneyu

from attnlab import plots
from attnlab.errors import UserError
from attnlab.nn import GPT
from attnlab.study import fitting
from attnlab.study.report import Options, Verdict

READS_TEXT = True
# Two groups, key first: (key)…(query).
PATTERNS = {
    "en": {
        "subject → verb": r"\b([a-z]{3,}) (is|are|has|have|returns?|raises?|must|can|may|will|should|does|was|were)\b",
        "adjective → noun": r"\b(new|same|first|other|following|given|empty|current|last|default|original|special|"
        r"single|next|optional|simple|local|global|whole|corresponding|built-in|additional|positive|negative) "
        r"([a-z]{3,})\b",
        "quote begins → ends": r"(\")[^\"\n]{2,}(\")",
    },
    "es": {
        "subject → verb": r"\b([a-záéíóúñ]{3,}) (dijo|respondió|era|estaba|había|fue|tenía|hizo|vio|quiso|podía|"
        r"replicó|preguntó|decía|llegó|dio|quedó|salió|es|está|tiene|puede)\b",
        "adjective → noun": r"\b(buen|gran|mal|buena|mala|pobre|valeroso|famoso|hermosa|noble|nuevo|nueva|propia|"
        r"propio|mucha|mucho|muchas|muchos|otra|otro|grande|mayor|mejor|primera|segunda) ([a-záéíóúñ]{3,})\b",
        "quote begins → ends": r"([«“\"¿])[^«»“”\"¿?\n]{2,}([»”\"?])",
    },
}
HEADS, CONTEXT = 4, 64
LEAST, MOST = 30, 200  # pairs per role


class Pair(NamedTuple):
    """A pair of spans in the text: the keys are [key, key_end), the queries [query, query_end)."""

    key: int
    key_end: int
    query: int
    query_end: int


def find(text: str, pattern: str) -> list[Pair]:
    """Find the pairs that fit into a window ending with the query.

    >>> find(60 * "." + " the cat is new", PATTERNS["en"]["subject → verb"])
    [Pair(key=65, key_end=68, query=69, query_end=71)]
    """
    pairs = [Pair(*match.span(1), *match.span(2)) for match in re.finditer(pattern, text)]
    return [pair for pair in pairs if pair.query_end - pair.key < CONTEXT <= pair.query_end]


def controls(text: str, pairs: list[Pair], taken: set[int], draw) -> list[Pair]:
    """Match each pair with another place that has the same distances and character classes at its edges.

    Args:
      text: the text to draw from.
      pairs: pairs to match; each place is used once.
      taken: query positions of real pairs, which are excluded.
      draw: a NumPy generator.
    """
    kinds = np.array([0 if c.isalnum() else 1 if c.isspace() else 2 for c in text])  # word, white space, punctuation
    is_bound = np.append(np.diff(kinds, prepend=-1) != 0, True)
    is_bound[:-1] |= kinds == 2  # each punctuation mark is a unit
    bounds = np.flatnonzero(is_bound)
    used = set(taken)
    found = []
    for pair in pairs:
        spans = np.array(pair) - pair.key
        at = bounds[(bounds >= CONTEXT) & (bounds + spans[3] < len(text))]
        same = is_bound[at + spans[1]] & is_bound[at + spans[2]] & is_bound[at + spans[3]]
        for edge in (spans[0], spans[1] - 1, spans[2], spans[3] - 1):
            same &= kinds[at + edge] == kinds[pair.key + edge]
        at = at[same & ~np.isin(at + spans[2], list(used))]
        if len(at):
            found.append(Pair(*(int(place) for place in draw.choice(at) + spans)))
            used.add(found[-1].query)
    return found


def measure(options: Options) -> list[dict]:
    """One row per seed, role, layer and head."""
    seeds, steps, layers, width = (1, 500, 3, 96) if options.fast else (3, 4000, 4, 192)
    source = fitting.read(options.path)
    text = source.tokenizer.decode(source.validation)
    advance = options.progress(seeds * steps)
    rows = []
    for seed in range(seeds):
        size = source.tokenizer.vocab_size
        model = GPT(size, layers, HEADS, width, CONTEXT, use_bias=False, positions="rotary", qk_norm=True)
        batches = source.batches(CONTEXT, 12, seed)
        params = jax.jit(model.init)(jax.random.key(seed), batches(0).tokens[:1, :-1])["params"]
        loss = fitting.text_loss(model)
        params = fitting.fit(loss, params, batches, steps, learning_rate=5e-3, weight_decay=0.1, advance=advance)
        draw = np.random.default_rng(seed)
        scored = {}
        for role, pattern in PATTERNS[source.language].items():
            all_pairs = find(text, pattern)
            pairs = [all_pairs[i] for i in draw.permutation(len(all_pairs))[:MOST]]
            others = controls(text, pairs, {pair.query for pair in all_pairs}, draw)
            if min(len(pairs), len(others)) >= LEAST:
                masses = (_masses(model, params, source.validation, which) for which in (pairs, others))
                scored[role] = tuple(masses)
        if not scored:
            raise UserError(
                f"the validation text has fewer than {LEAST} pairs of every role: give a longer one with --path"
            )
        tried = len(scored) * layers * HEADS
        for role, (right, other) in scored.items():
            for layer in range(layers):
                for head in range(HEADS):
                    a, b = right[:, layer, head], other[:, layer, head]
                    p = min(1.0, float(mannwhitneyu(a, b, alternative="greater").pvalue) * tried)
                    measured = {"weight": float(a.mean()), "control": float(b.mean()), "pairs": len(a), "p": p}
                    lift = measured["weight"] / max(measured["control"], 1e-9)
                    rows.append({"seed": seed, "role": role, "layer": layer, "head": head, "lift": lift} | measured)
    return rows


def _masses(model, params, tokens, pairs) -> np.ndarray:
    """Weight of each head on the keys, averaged over the queries, `[pairs, layers, heads]`."""
    ends = np.array([pair.query_end for pair in pairs])
    windows = np.stack([tokens[end - CONTEXT : end] for end in ends])
    places = np.array(pairs) - (ends - CONTEXT)[:, None]
    column = np.arange(CONTEXT)
    keys = (column >= places[:, :1]) & (column < places[:, 1:2])
    queries = (column >= places[:, 2:3]) & (column < places[:, 3:])

    @jax.jit
    def read(windows, keys, queries):
        _, sown = model.apply({"params": params}, windows, mutable=["intermediates"])
        blocks = (sown["intermediates"][f"block_{layer}"]["attention"] for layer in range(model.num_layers))
        weights = jnp.stack([block["attention_weights"][0] for block in blocks], axis=1)  # [pairs, L, H, T, T]
        return jnp.einsum(
            "plhqk,pq,pk->plh", weights, queries / queries.sum(1, keepdims=True), keys.astype(jnp.float32)
        )

    return np.asarray(read(windows, keys, queries), np.float64)


def judge(rows: list[dict]) -> Verdict:
    """Held if, for each role, the best head passes both thresholds in the worst seed."""
    parts = []
    for role in PATTERNS["en"]:  # the roles are the same in every language
        if not any(row["role"] == role for row in rows):
            parts.append((False, f"{role}: not measured, the validation text has fewer than {LEAST} pairs"))
            continue
        by_seed = []
        for seed in sorted({row["seed"] for row in rows}):
            there = [row for row in rows if (row["role"], row["seed"]) == (role, seed)]
            by_seed.append(max(there, key=lambda row: (row["p"] < 0.01) * row["lift"]))
        worst = min(by_seed, key=lambda row: (row["p"] < 0.01) * row["lift"])
        text = (
            f"{role}: layer {worst['layer']} head {worst['head']} gives it {worst['lift']:.1f} times the weight of the "
            f"control ({worst['weight']:.3f}, {worst['control']:.3f}; p = {worst['p']:.1g}, {worst['pairs']} pairs)"
        )
        parts.append((worst["p"] < 0.01 and worst["lift"] >= 2, text))
    return Verdict.of(*parts)


def draw(rows: list[dict]) -> Figure:
    """Lift of every head for every role, averaged over seeds."""
    roles = list(dict.fromkeys(row["role"] for row in rows))
    layers, heads = (1 + max(row[name] for row in rows) for name in ("layer", "head"))
    lift = np.array(
        [
            [np.mean([r["lift"] for r in rows if (r["role"], r["layer"], r["head"]) == (role, l, h)]) for role in roles]
            for l in range(layers)
            for h in range(heads)
        ]
    )
    best = {role: lift[:, i].max() for i, role in enumerate(roles)}
    top = max(best, key=best.get)
    return plots.lines(
        {role: (range(layers * heads), lift[:, i]) for i, role in enumerate(roles)},
        f"Heads differ: the best for “{top}” gives it {best[top]:.1f} times the weight of the shuffled control",
        x=f"head ({heads} in each of {layers} layers, first layer first)",
        y="weight on the right keys (times the control's)",
    )
