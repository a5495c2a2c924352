"""Some head links verbs to subjects, another adjectives to nouns, and another finds where a quotation began.

Heads for such relations between words are known from larger models (Clark et al. 2019, in BERT). Here several character
GPTs of the quickstart's size are trained. Pairs are found in held-out text with regular expressions (Spanish or
English, depending on the text): the characters of a pair's later part are the queries, those of the earlier part the
keys. A head's score is its weight on these keys, relative to the weight at as many control places drawn from the text,
with the same distances and the same character classes at the edges (word, white space, punctuation) but without that
role. So a head that attends to the previous word, whatever it is, scores 1. The p-value of the difference
(Mann-Whitney) is multiplied by the number of heads and roles tried (Bonferroni). A role counts as found if, in every
seed, some head has twice the control's weight with a p-value below 1 %. The scores of `attnlab.see` on windows of the
same text then say what else these heads do: a head with most of its weight on the previous character, say, is a head
for that, even if the rest of its weight favours a role.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from scipy.stats import mannwhitneyu

from attnlab import plots, see
from attnlab.results.statistics import Interval
from attnlab.study import fitting
from attnlab.study.report import Advance, Options, Verdict
from attnlab.support.errors import UserError

from . import _quickstart as quickstart
from ._quickstart import CONTEXT, HEADS, LAYERS

READS_TEXT = True
# Each pattern has two groups: the first matches the key, the second the query.
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
KINDS = ("previous", "duplicate", "induction", "current", "sink")  # other roles of heads, see `attnlab.see.scores`
LEAST = 30  # pairs per role


class Size(NamedTuple):
    """Size of the study: seeds, updates, the most pairs per role, and the number of held-out windows."""

    seeds: int
    steps: int
    pairs: int
    windows: int


FAST = Size(seeds=2, steps=250, pairs=120, windows=32)
FULL = Size(seeds=6, steps=1500, pairs=400, windows=96)


class Pair(NamedTuple):
    """A pair of spans in the text: the keys are [key, key_end), the queries [query, query_end)."""

    key: int
    key_end: int
    query: int
    query_end: int


def find(text: str, pattern: str) -> list[Pair]:
    """Find the pairs that fit into a window of CONTEXT characters that ends with the query."""
    pairs = [Pair(*match.span(1), *match.span(2)) for match in re.finditer(pattern, text)]
    return [pair for pair in pairs if pair.query_end - pair.key < CONTEXT <= pair.query_end]


def controls(text: str, pairs: list[Pair], taken: set[int], draw) -> list[Pair]:
    """For each pair, a place not in `taken` with the same distances and the same character classes at its edges."""
    kinds = np.array([0 if c.isalnum() else 1 if c.isspace() else 2 for c in text])  # word, white space, punctuation
    is_bound = np.append(np.diff(kinds, prepend=-1) != 0, True)
    is_bound[:-1] |= kinds == 2  # each punctuation mark is a unit
    bounds = np.flatnonzero(is_bound)
    used = set(taken)
    chosen = []
    for pair in pairs:
        spans = np.array(pair) - pair.key
        at = bounds[(bounds >= CONTEXT) & (bounds + spans[3] < len(text))]
        same = is_bound[at + spans[1]] & is_bound[at + spans[2]] & is_bound[at + spans[3]]
        for edge in (spans[0], spans[1] - 1, spans[2], spans[3] - 1):
            same &= kinds[at + edge] == kinds[pair.key + edge]
        at = at[same & ~np.isin(at + spans[2], list(used))]
        if len(at):
            chosen.append(Pair(*(int(place) for place in draw.choice(at) + spans)))
            used.add(chosen[-1].query)
    return chosen


def measure(options: Options) -> list[dict]:
    """One row per seed, role, layer and head."""
    size = FAST if options.fast else FULL
    source = fitting.read(options.path, least=CONTEXT + 1)
    pairs = places(source, size.pairs)
    advance = options.progress(size.seeds * size.steps)
    model, untrained, trained = train(source, size, advance)
    masses = {role: [_masses(model, trained, source.validation, some) for some in both] for role, both in pairs.items()}
    losses, scores = _look(model, untrained, trained, source.validation, size.windows)
    tried = len(pairs) * LAYERS * HEADS
    rows = []
    for seed in range(size.seeds):
        for role, (right, other) in masses.items():
            for layer, head in np.ndindex(LAYERS, HEADS):
                a, b = right[seed, :, layer, head], other[seed, :, layer, head]
                p = min(1.0, float(mannwhitneyu(a, b, alternative="greater").pvalue) * tried)
                weight, control = float(a.mean()), float(b.mean())
                rows.append(
                    {"seed": seed, "role": role, "layer": layer, "head": head, "lift": weight / max(control, 1e-9)}
                    | {"weight": weight, "control": control, "pairs": len(a), "p": p, "loss": float(losses[seed])}
                    | {kind: float(scores[seed].values[kind][layer, head]) for kind in (*KINDS, "entropy")}
                    | {"kind": _kind(scores[seed], layer, head)}
                )
    return rows


def places(source: fitting.StudyText, most: int) -> dict[str, tuple[list[Pair], list[Pair]]]:
    """For each role, pairs in the validation text and their controls; UserError if every role has too few pairs."""
    text, draw = source.tokenizer.decode(source.validation), np.random.default_rng(0)
    by_role = {}
    for role, pattern in PATTERNS[source.language].items():
        all_pairs = find(text, pattern)
        pairs = [all_pairs[i] for i in draw.permutation(len(all_pairs))[:most]]
        others = controls(text, pairs, {pair.query for pair in all_pairs}, draw)
        if min(len(pairs), len(others)) >= LEAST:
            by_role[role] = pairs, others
    if not by_role:
        raise UserError(
            f"the validation text has fewer than {LEAST} pairs of every role: give a longer one with --path"
        )
    return by_role


def train(source: fitting.StudyText, size: Size, advance: Advance):
    """Train one model per seed: the model, its initial and its trained parameters, with an axis for the seeds."""
    model = quickstart.gpt(source.tokenizer.vocab_size)
    fitted = fitting.fit_seeds(
        **fitting.next_token(model),
        batches=source.windows(CONTEXT, quickstart.CONFIG.batch_size),
        optimizer=quickstart.adamw(size.steps),
        seeds=range(size.seeds),
        looks=[0, size.steps],
        advance=advance,
    )
    (_, untrained), (_, trained) = fitted
    return model, untrained, trained


def _masses(model, params, tokens, pairs) -> np.ndarray:
    """Weight of each head on the keys, averaged over the queries, `[seeds, pairs, layers, heads]`."""
    ends = np.array([pair.query_end for pair in pairs])
    windows = np.stack([tokens[end - CONTEXT : end] for end in ends]).astype(np.int32)
    at = np.array(pairs) - (ends - CONTEXT)[:, None]
    column = np.arange(CONTEXT)
    keys = (column >= at[:, :1]) & (column < at[:, 1:2])
    queries = (column >= at[:, 2:3]) & (column < at[:, 3:])
    shares = queries / queries.sum(1, keepdims=True)
    return np.asarray(_read(model, params, windows, keys.astype(np.float32), shares.astype(np.float32)), np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _read(model, params, windows, keys, shares):
    def one(params):
        weights = see.capture(model, params, windows).stack("pattern")  # [L, pairs, H, T, T]
        return jnp.einsum("lphqk,pq,pk->plh", weights, shares, keys)

    return jax.lax.map(one, params)


def _look(model, untrained, trained, tokens, count: int):
    """Held-out losses `[seeds]`, and for each seed the scores of its heads on evenly spaced windows of the text."""
    windows = quickstart.evenly_spaced(tokens, CONTEXT + 1, count)
    inputs, targets = windows[:, :-1], windows[:, 1:]

    @jax.jit
    def losses(params):
        return jax.lax.map(lambda params: model.apply(params, inputs, targets=targets).mean(), params)

    @jax.jit
    def patterns(params):
        return jax.lax.map(lambda params: see.capture(model, params, inputs).stack("pattern"), params)

    before = np.concatenate(np.asarray(patterns(untrained)), axis=2)  # [L, B, heads of all seeds, T, T]
    after = np.asarray(patterns(trained))
    return losses(trained), [see.scores(each, inputs, (*KINDS, "entropy"), untrained=before) for each in after]


def _kind(scores: see.Scores, layer: int, head: int) -> str:
    """Where a head has most of its weight, if it scores above untrained heads; otherwise ""."""
    kinds = [kind for kind in KINDS if (layer, head) in scores.heads(kind) and scores.values[kind][layer, head] > 0.5]
    return max(kinds, key=lambda kind: scores.values[kind][layer, head], default="")


def best(rows: list[dict], role: str) -> list[dict]:
    """For each seed, the row of the head with the highest lift for a role; heads with p-values below 1 % come first."""
    seeds = sorted({row["seed"] for row in rows})
    groups = ([row for row in rows if (row["role"], row["seed"]) == (role, seed)] for seed in seeds)
    return [max(each, key=_rank) for each in groups if each]


def _rank(row: dict) -> tuple[bool, float]:
    return row["p"] < 0.01, row["lift"]


def judge(rows: list[dict]) -> Verdict:
    """Held if the best head of each role passes both thresholds in the worst seed, and has no other main target."""
    parts, others = [], []
    for role in PATTERNS["en"]:  # the roles are the same in every language
        by_seed = best(rows, role)
        if not by_seed:
            parts.append((False, f"{role}: not measured, the validation text has fewer than {LEAST} pairs"))
            continue
        passing, worst = sum(row["p"] < 0.01 and row["lift"] >= 2 for row in by_seed), min(by_seed, key=_rank)
        text = (
            f"{role}: found in {passing} of {len(by_seed)} seeds; the best heads give it "
            f"{Interval.of([row['lift'] for row in by_seed]):.1f} times the control's weight, in the worst seed "
            f"{worst['lift']:.1f} times ({worst['weight']:.3f}, {worst['control']:.3f}; p = {worst['p']:.1g}, "
            f"{worst['pairs']} pairs)"
        )
        parts.append((passing == len(by_seed), text))
        kinds = [row["kind"] for row in by_seed if row["kind"]]
        named = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "none"
        previous = Interval.of([row["previous"] for row in by_seed])
        others.append((not kinds, f"{role} {named} ({previous:.2f} on the previous character)"))
    summary = "; ".join(text for _, text in others)
    parts.append(
        (all(held for held, _ in others), f"best heads with most of their weight on something else: {summary}")
    )
    return Verdict.of(*parts)


def draw(rows: list[dict]) -> Figure:
    """Lift of the heads for each role, ranked in each seed, and their weight on the previous character.

    Left, a head has a role if its weight is at least twice the control's. Right, the same heads in the same order: a
    head with a high weight attends to the previous character. Bands are standard deviations over seeds.
    """

    def ranked(role, value):
        seeds = sorted({row["seed"] for row in rows})
        by_seed = ([row for row in rows if (row["role"], row["seed"]) == (role, seed)] for seed in seeds)
        values = [[row[value] for row in sorted(each, key=_rank, reverse=True)] for each in by_seed]
        return np.mean(values, axis=0), np.std(values, axis=0)

    def panel(value, y, log=""):
        measured = {role: ranked(role, value) for role in dict.fromkeys(row["role"] for row in rows)}
        series = {role: (range(1, len(mean) + 1), mean) for role, (mean, _) in measured.items()}
        spread = {role: deviation for role, (_, deviation) in measured.items()}
        return {"series": series, "spread": spread, "log": log, "x": "rank of the head for the role", "y": y}

    return plots.panels(
        {
            "weight on the role's keys": panel("lift", "weight (times the control's)"),
            "what else the same heads do": panel("previous", "weight on the previous character"),
        },
        judge(rows).title("Each role has a head that does not just attend to the previous character"),
    )
