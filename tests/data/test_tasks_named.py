"""Tasks that a config names: answers, chance, parsing, and batches."""

import collections
import itertools

import numpy as np
import pytest

from attnlab.data.tasks import TEST, recall
from attnlab.data.tasks.named import parse
from attnlab.data.tasks.task_batches import HeldOutBatches, TaskBatches
from attnlab.support.errors import UserError

# Each task at a small size, and the length of its sequences.
CASES = {
    "task:recall pairs=3 symbols=5": 12,
    "task:recall pairs=3 rewrites=4 symbols=8": 18,
    "task:recall pairs=5 fewest=1 symbols=6": 16,
    "task:recall pairs=3 symbols=5 queries=spread": 14,
    "task:parity shortest=2 longest=9": 10,
    "task:modular base=3 shortest=2 longest=9 answers=last": 10,
    "task:copy symbols=3 kinds=4": 12,
    "task:induction triggers=2 kinds=4": 12,
}


def solved(name, row):
    """The answers of one sequence, in characters, by the rule of its task; None where there is no answer."""
    kind, length = name.split()[0].removeprefix("task:"), len(row)
    answers = [None] * length
    if "spread" in name:
        known = dict(zip(row[0:6:2], row[1:6:2]))
        return [None] * 6 + [known.get(token) for token in row[6:]]
    if kind == "recall":
        known, at, row = {}, len(row) - len(row.lstrip(".")), row.rstrip(".")
        while at + 1 < len(row) and row[at + 1].islower():
            known[row[at]], at = row[at + 1], at + 2
        answers[at : len(row)] = [known[key] for key in row[at:]]
    if kind in ("parity", "modular"):
        digits, base = row.rstrip("."), 2 if kind == "parity" else 3
        sums = [str(total % base) for total in itertools.accumulate(map(int, digits))]
        answers[: len(sums)] = [None] * (len(sums) - 1) + sums[-1:] if "last" in name else sums
    if kind == "copy":
        noise = row.rstrip("?")
        answers[len(noise) :] = noise.replace(".", "")
    if kind == "induction":
        answers[-2:] = [row[row.index(trigger) + 1] for trigger in row[-2:]]
    return answers


def guessed(tokens, targets):
    """The accuracy of one guess per sequence: its most frequent token among all answers, the last one in a tie."""
    kinds, right = set(targets[targets >= 0].tolist()), 0
    for row, wanted in zip(tokens.tolist(), targets):
        counts = collections.Counter(token for token in reversed(row) if token in kinds)
        right += (wanted == counts.most_common(1)[0][0]).sum()
    return right / (targets >= 0).sum()


@pytest.mark.parametrize("name", CASES)
def test_task_batch_follows_its_rule_and_depends_on_seed_and_step(name):
    task = parse(name)
    assert CASES[name] >= task.shortest_context and list(task.alphabet) == sorted(set(task.alphabet))
    options = {"context": CASES[name], "batch_size": 2000, "seed": 1}
    batch = TaskBatches(task, **options)[5]
    tokens, targets = batch.tokens[:, :-1], batch.targets
    assert tokens.dtype == targets.dtype == np.int32 and tokens.shape == targets.shape == (2000, CASES[name])
    texts = ["".join(task.alphabet[token] for token in row) for row in tokens[:200]]
    for text, wanted in zip(texts, targets):
        assert [None if n < 0 else task.alphabet[n] for n in wanted] == solved(name, text)
    if "longest=9" in name:
        assert {len(text.rstrip(".")) for text in texts} == set(range(2, 10))
    counted = targets[targets >= 0]
    best = np.bincount(counted).max() / len(counted)
    # The largest of at most 8 shares, each over 2,000 independent sequences or more: five deviations above the mean.
    assert task.chance <= best + 1e-9 and best <= task.chance + 5 * (task.chance * (1 - task.chance) / 2000) ** 0.5
    blind = task.blind(CASES[name])
    # Five deviations over 2,000 independent sequences, and over the 10,000 draws that `blind` may use.
    assert abs(guessed(tokens, targets) - blind) <= 5 * (blind * (1 - blind)) ** 0.5 * (2000**-0.5 + 10_000**-0.5)
    if batch.places is None:
        assert "parity" in name  # an answer at each digit
    else:
        assert np.take_along_axis(targets, batch.places, axis=1).min() >= 0 and batch.places.size == counted.size
    shares = [TaskBatches(task, **options, process_index=n, process_count=2)[5] for n in range(2)]
    for field in ("tokens", "targets", "example", "weight"):
        both = np.concatenate([getattr(share, field) for share in shares])
        np.testing.assert_array_equal(both, getattr(batch, field))
    assert (TaskBatches(task, **options)[6].tokens != batch.tokens).any()
    assert (TaskBatches(task, **options | {"seed": 2})[5].tokens != batch.tokens).any()


def test_recall_with_rewrites_asks_for_the_last_value_of_every_key():
    tokens, targets, pairs = map(np.asarray, recall(0, batch_size=300, pairs=(1, 3), vocab_size=21, rewrites=5))
    stale = 0
    for row, wanted, n in zip(tokens, targets, pairs):
        writes, queries = row[2 * (3 - n) : 16].reshape(-1, 2), row[16:]
        last = dict(writes.tolist())
        assert len(writes) == n + 5 and len(last) == n and len(set(writes[:, 1])) == n + 5
        assert [last[key] for key in queries.tolist()] == wanted.tolist()
        stale += (dict(writes[:n].tolist())[queries[0]] != wanted[0]).sum()
    assert stale > 150


def test_recall_with_fewest_draws_doubling_pair_counts_uniformly():
    tokens, _ = map(np.asarray, parse("task:recall pairs=12 fewest=3 symbols=12").draw(0, batch_size=3000, length=36))
    shown = (tokens[:, :24] > 0).sum(axis=1) // 2
    counts = {pairs: int((shown == pairs).sum()) for pairs in (3, 6, 12)}
    assert sum(counts.values()) == 3000
    assert max(abs(count - 1000) for count in counts.values()) < 5 * (3000 * 2 / 9) ** 0.5  # five deviations


def test_held_out_batches_use_steps_that_training_never_reaches():
    task, options = parse("task:copy symbols=3"), {"context": 12, "batch_size": 4}
    first, second, whole = (
        HeldOutBatches(task, windows=10, part=part, **options) for part in ("first", "second", "all")
    )
    assert [batch.weight.tolist() for batch in first] == [[1] * 4, [1] * 4, [1, 1, 0, 0]]
    assert [batch.example[0] for batch in first] == [0, 4, 8] and len(TaskBatches(task, **options, seed=0)) == TEST
    at = [[TaskBatches(task, **options, seed=0)[TEST + n].tokens for n in steps] for steps in ((0, 2, 4), (1, 3, 5))]
    np.testing.assert_array_equal([batch.tokens for batch in first], at[0])
    np.testing.assert_array_equal([batch.tokens for batch in second], at[1])
    np.testing.assert_array_equal(whole[1].tokens, at[1][0])


@pytest.mark.parametrize("name", ["task:parity", "task:modular", "task:copy", "task:induction"])
def test_longer_task_fills_a_longer_sequence(name):
    task = parse(name).longer(100)
    tokens, targets = task.draw(0, batch_size=4, length=100)
    assert tokens.shape == (4, 100) and (np.asarray(targets)[:, -1] >= 0).all() and task.shortest_context <= 100


def test_recall_has_a_longer_task_only_with_spread_queries():
    assert parse("task:recall").longer(1000) is None
    spread = parse("task:recall queries=spread")
    assert spread.longer(1000) == spread
    assert len(parse("task:recall symbols=300").alphabet) == 601 and parse("python_docs") is None


@pytest.mark.parametrize(
    "name, message",
    [
        ("task:", "no task ''"),
        ("task:recal", r"no task 'recal' \(did you mean recall\?\): expected recall, parity"),
        ("task:recall pears=3", "'pears=3' is not an option of recall: expected some of pairs=8, fewest=0, rewrites=0"),
        ("task:recall pairs=0", "pairs = 0: expected 1 or more"),
        ("task:recall pairs=²", "pairs = '²': expected a value like 8"),
        (f"task:recall pairs={'9' * 5000}", "pairs = '9.*9': expected a value like 8"),
        ("task:recall pairs=x", "pairs = 'x': expected a value like 8"),
        ("task:recall pairs=20 rewrites=9", r"symbols = 26: expected pairs \+ rewrites = 29 or more"),
        ("task:recall fewest=2 queries=spread", "fewest = 2: it has no effect with queries = 'spread': keep the"),
        ("task:modular base=11", "base = 11: expected a number from 2 to 10"),
        ("task:parity shortest=50", "shortest = 50: expected longest = 40 or less"),
        ("task:induction triggers=11", "triggers = 11: expected a number from 1 to 10"),
    ],
)
def test_impossible_task_raises_one_line(name, message):
    with pytest.raises(UserError, match=message):
        parse(name)
