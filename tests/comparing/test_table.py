"""Losses and times of runs, and the table of a comparison."""

import json
import math

import numpy as np
import pytest

from attnlab import comparing
from attnlab import config as configs
from attnlab.comparing import protocol, race, report, table
from attnlab.comparing.protocol import Protocol, Rate
from attnlab.comparing.variants import of_values
from attnlab.nn import custom
from attnlab.results.table import Table
from attnlab.support import paths
from attnlab.support.errors import UserError


def run(folder, *records):
    """A workdir with some records and a vocabulary of 65."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    metadata = {"corpus": {"name": "text", "sha256": "0"}, "vocab_size": 65}
    (folder / "config.json").write_text(configs.to_json(configs.RunConfig(), **metadata))
    return folder


def trained(step, speed):
    return {"step": step, "split": "train", "loss": 3.0, "tokens": 10 * step, "tokens_per_second": speed}


def validated(step, loss):
    return {"step": step, "split": "val", "loss": loss, "tokens": 10 * step}


def final(loss):
    return {"step": 9, "split": "final", "loss": loss}


DIVERGED = {"step": 3, "split": "diverged", "loss": None}


def test_seconds_of_a_run_use_the_speed_from_the_race(tmp_path):
    records = [trained(2, 10.0), validated(2, 3.0), trained(4, 20.0), validated(6, 2.0), trained(6, 20.0)]
    curve = protocol.curve(run(tmp_path / "run", *records), 40.0)
    np.testing.assert_allclose(curve, [[20, 0.5, 3.0], [60, 1.5, 2.0]])


def test_diverged_run_counts_as_chance_and_unfinished_run_as_nan(tmp_path):
    assert protocol.result(run(tmp_path / "diverged", trained(2, 10.0), DIVERGED)) == math.log(65)
    assert math.isnan(protocol.result(run(tmp_path / "unfinished", trained(2, 10.0))))
    assert protocol.result(run(tmp_path / "finished", final(1.5))) == 1.5


@pytest.mark.parametrize(
    ("p", "text"), [(0.0123, "0.012"), (0.0499, "0.0499"), (0.0501, "0.05"), (0.04999, "0.04999"), (2e-5, "< 0.001")]
)
def test_p_value_has_enough_digits_for_its_verdict(p, text):
    assert table.p_value(p) == text


PROTOCOL = Protocol(configs.RunConfig(), (1e-3, 1e-2, 1e-1), (0,), (1, 2, 3))
VARIANTS = of_values({"one": {}, "two": {"model.attention.window": 16}})


def test_tuning_and_final_runs_use_different_halves_and_seeds():
    tuning, last = PROTOCOL.tuning(VARIANTS[1]), PROTOCOL.final(VARIANTS[1], 1e-2)
    assert [(p.config.seed, p.config.optimizer.learning_rate, p.config.eval.part) for p in tuning] == [
        (0, 1e-3, "first"), (0, 1e-2, "first"), (0, 1e-1, "first")
    ]  # fmt: skip
    assert [(p.config.seed, p.config.optimizer.learning_rate, p.config.eval.part) for p in last] == [
        (1, 1e-2, "second"), (2, 1e-2, "second"), (3, 1e-2, "second")
    ]  # fmt: skip
    assert {p.config.model.layers[0].window for p in (*tuning, *last)} == {16}
    assert len({p.name for p in (*tuning, *last)}) == 6
    assert not PROTOCOL._replace(rates=(1e-2,)).tuning(VARIANTS[0])


def test_edited_file_gives_runs_other_names(tmp_path):
    def named(factor):
        (tmp_path / "mine.py").write_text(f"def near(score, b, h, i, j):\n    return score - {factor} * (i - j)\n")
        custom.import_file(tmp_path / "mine.py")
        return [point.name for point in PROTOCOL.final(of_values({"one": {}, "near": "model.layers=near"})[1], 1e-2)]

    first, edited = named(0.1), named(0.2)
    assert not {*first} & {*edited} and named(0.1) == first and ",code=" in first[0]


def test_muon_keeps_the_ratio_of_its_learning_rates():
    muon = PROTOCOL._replace(config=PROTOCOL.config.changed({"optimizer.name": "muon"}))
    before = configs.Optimizer()
    for point in muon.tuning(VARIANTS[0]):
        optimizer = point.config.optimizer
        assert optimizer.muon_learning_rate / optimizer.learning_rate == pytest.approx(
            before.muon_learning_rate / before.learning_rate
        )


@pytest.mark.parametrize(
    ("losses", "rate", "extended"),
    [
        ([3.0, 2.0, 4.0], 1e-2, None),
        ([1.0, 2.0, None], 1e-3, (1e-4, 1e-3, 1e-2, 1e-1)),
        ([3.0, 2.0, 1.0], 1e-1, (1e-3, 1e-2, 1e-1, 1.0)),
        ([None] * 3, 1e-3, (1e-4, 1e-3, 1e-2, 1e-1)),
    ],
)
def test_lowest_loss_chooses_the_rate_and_an_edge_extends_the_grid(tmp_path, losses, rate, extended):
    for point, loss in zip(PROTOCOL.tuning(VARIANTS[0]), losses):
        run(tmp_path / point.name, DIVERGED if loss is None else final(loss))
    choice = protocol.chosen_rate(PROTOCOL, VARIANTS[0], PROTOCOL.rates, tmp_path)
    assert (choice.chosen, choice.at_edge) == (rate, extended is not None)
    assert extended is None or choice.extended() == extended
    assert not Rate(1e-2, (1e-2,)).at_edge  # the user's only rate
    assert Rate(0.01, (0.01, 0.0101)).extended()[0] < 0.01  # however near its neighbour is


def test_rate_with_failed_runs_does_not_bound_the_grid(tmp_path):
    for point, loss in zip(PROTOCOL.tuning(VARIANTS[0]), [3.0, 2.0]):
        run(tmp_path / point.name, final(loss))
    choice = protocol.chosen_rate(PROTOCOL, VARIANTS[0], PROTOCOL.rates, tmp_path)
    assert (choice.chosen, choice.tried, choice.at_edge) == (1e-2, (1e-3, 1e-2), True)
    none = protocol.chosen_rate(PROTOCOL, VARIANTS[0], PROTOCOL.rates, tmp_path / "none")
    assert (none.chosen, none.tried, none.at_edge) == (1e-3, (), False)


def rows_of(protocol, folder, measured, speeds):
    rates = {variant.name: Rate(1e-2, protocol.rates) for variant in VARIANTS}
    rows = table.results(protocol, VARIANTS, folder, rates, measured, speeds)
    return Table.of(table.columns(protocol.measure, len(protocol.seeds), len(VARIANTS)), rows)


@pytest.fixture
def whole(tmp_path):
    """A table of two variants; the second has a run that diverged."""
    losses = {"one": [1.0, 1.2, 1.1], "two": [1.5, None, 1.6]}
    for variant in VARIANTS:
        for point, loss in zip(PROTOCOL.final(variant, 1e-2), losses[variant.name]):
            steps = [trained(1, 1.0), validated(1, 2.0), trained(9, 1e6)]  # speeds measured at another time
            run(tmp_path / point.name, *steps, *([DIVERGED] if loss is None else [validated(9, loss), final(loss)]))
    measured = {"one": {"parameters": 7, "loss_1x": 1.0, "loss_2x": 3.0}}
    raced = {"one": [22.0, 20.0, 20.0], "two": [88.0, 80.0, 60.0]}  # tokens per second; a run has 90 tokens
    speeds = {name: {"train_tokens_per_second": per_seed} for name, per_seed in raced.items()}
    return rows_of(PROTOCOL, tmp_path, measured, speeds)


def test_table_counts_diverged_runs_and_pairs_seeds(whole):
    one, two = rows = whole.rows
    assert (one["loss"], one["diverged"], one["seeds"]) == (pytest.approx(1.1), 0, 3)
    assert (two["loss"], two["diverged"], two["seeds"]) == (pytest.approx((1.5 + math.log(65) + 1.6) / 3), 1, 3)
    assert two["difference_loss"] == pytest.approx(two["loss"] - one["loss"]) and two["verdict"] == "not told apart"
    assert all(value is None for name, value in one.items() if name.startswith(("difference_", "verdict")))
    assert (one["loss_1x"], one["loss_2x"], one["loss_4x"], two["loss_1x"]) == (1.0, 3.0, None, None)
    # After 1.125 s, when the fastest run ends: 22.5 tokens of the first variant, between 10 and 90.
    assert one["loss_at_equal_time"] == pytest.approx(np.mean([2 - at * 12.5 / 80 for at in (1.0, 0.8, 0.9)]))
    assert two["loss_at_equal_time"] == pytest.approx(two["loss"])  # it is the fastest; chance counts where it diverged
    names = [f"train_tokens_per_second{end}" for end in ("", "_low", "_high")]
    assert [[row[name] for name in names] for row in rows] == [[20.0, 20.0, 22.0], [80.0, 60.0, 88.0]]
    assert whole.only(*names[:1]).cells()[1] == ["80 (60 to 88)"]


@pytest.mark.parametrize(
    ("speeds", "verdict"),
    [([80.0, 80.0, 80.0], "better"), ([25.0, 80.0, 80.0], "not told apart"), ([20.0] * 3, "worse"), (None, None)],
)
def test_verdict_at_equal_time_holds_in_every_round_of_the_race(tmp_path, speeds, verdict):
    """The second variant needs 1.6 times as many tokens: it is better from 1.6 times the speed on."""
    workdirs = [[tmp_path / f"{name}{seed}" for seed in range(3)] for name in "ab"]
    for n, folders in enumerate(workdirs):
        for seed, folder in enumerate(folders):
            losses = [3 + seed / 100 - step / (10 + 6 * n) for step in range(1, 10)]
            run(folder, *(validated(step, loss) for step, loss in enumerate(losses, 1)), final(losses[-1]))
    _, (first, second) = race.at_equal_time(workdirs, [[20.0] * 3, speeds or [math.nan]])
    assert (first, second) == (None, verdict)


def test_unfinished_run_does_not_shorten_equal_time(tmp_path):
    workdirs = [[tmp_path / f"{name}{seed}" for seed in range(4)] for name in "ab"]
    for n, folders in enumerate(workdirs):
        for seed, folder in enumerate(folders):
            losses = [3 + seed / 100 - step / 10 - n * (step > 5) for step in range(1, 10)]
            records = [*(validated(step, loss) for step, loss in enumerate(losses, 1)), final(losses[-1])]
            run(folder, *records[: 2 if (n, seed) == (1, 3) else None])  # the last run failed early
    losses, verdicts = race.at_equal_time(workdirs, [[20.0] * 3] * 2)
    assert verdicts == [None, "better"] and np.isnan(losses).tolist() == [[False] * 4, [False] * 3 + [True]]


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ([[0.10, 0.11, 0.12], [0.04, 0.05, 0.06]], "not trained far enough"),
        ([[0.10, 0.11, 0.12], [0.24, 0.25, 0.26]], "better"),
        ([[0.24, 0.25, 0.26], [0.04, 0.05, 0.06]], "worse"),
    ],
)
def test_accuracies_no_better_than_a_blind_guess_have_no_verdict(tmp_path, accuracies, verdict):
    name = "task:recall pairs=8"  # a blind guess is one of the eight values in the sequence, out of 26
    tasks = PROTOCOL._replace(config=PROTOCOL.config.changed({"data.name": name}), measure="accuracy")
    for variant, values in zip(VARIANTS, accuracies):
        for point, accuracy in zip(tasks.final(variant, 1e-2), values):
            run(tmp_path / point.name, final(3.0) | {"accuracy": accuracy})
    rows = rows_of(tasks, tmp_path, {}, {}).rows
    assert (rows[1]["verdict"], rows[1]["blind"]) == (verdict, 1 / 8)
    (sentence,) = report.sentences(rows, "accuracy")
    untrained = "two and one are not trained far enough to compare: accuracies 0.050 and 0.110, blind guess "
    assert sentence.startswith(untrained + "0.125" if "enough" in verdict else f"two is {verdict} than one by 0.")


def test_table_round_trips_through_csv(whole, tmp_path):
    paths.write_csv(tmp_path / table.TABLE, whole.rows)
    assert comparing.read(tmp_path) == whole.rows
    assert next(iter(whole.rows[0])) == "variant"
    assert whole.shown().heads[:3] == ["variant", "verdict", "p"] and all(column.help for column in whole.columns[1:])


def test_sentence_has_difference_evidence_and_verdict_at_equal_time():
    row = {"variant": "b", "seeds": 5, "pairs": 5, "diverged": 0}
    row |= {"difference_loss": -0.1724, "difference_loss_interval": 0.0049}
    start = {"variant": "a", "tokens_per_parameter": None}
    row |= {"difference_p": 2e-5, "verdict": "better", "verdict_at_equal_time": "worse", "rates_at_edge": False}
    assert report.sentences([start, row], "loss") == [
        "b is better than a by 0.1724 ± 0.0049 nats after the same number of tokens (p < 0.001, five seeds), but worse "
        "at equal time."
    ]
    untimed = row | {"verdict_at_equal_time": None}
    assert report.sentences([start, untimed], "loss")[0].endswith("five seeds).")
    start["tokens_per_parameter"] = 0.4812
    assert "nats after the same number of tokens, 0.48 per parameter (p" in report.sentences([start, row], "loss")[0]
    row |= {"verdict": "not told apart", "difference_p": 0.31, "difference_seeds_needed": 24}
    row |= {"difference_seeds_needed_low": 9, "difference_seeds_needed_high": 1000}
    (text,) = report.sentences([start, row], "loss")
    assert "do not differ significantly" in text and "p = 0.31, five seeds; 24 seeds (9 to ≥ 1,000)" in text


def test_verdict_mentions_a_learning_rate_at_the_edge():
    row = {"verdict": "better", "rates_at_edge": True}
    (column,) = [each for each in table.columns("loss", 3, 2) if each.key == "verdict"]
    assert column.cell(row) == "better, rate at the edge" and column.cell(row | {"rates_at_edge": False}) == "better"


def test_remark_names_variants_that_differ_in_layers_and_positions(whole, tmp_path):
    fields = {
        "gated": "model.layers=gated_delta",
        "alibi": "model.positions=alibi",
        "near": {"model.attention.window": 9},
    }
    part = report.TaskComparison("", tmp_path, PROTOCOL, of_values({"one": {}} | fields), "none", None)
    remark = "Two things differ from one, layers and positions (rotary), in gated."
    assert [text for text in report.remarks(part, whole.rows) if "differ" in text] == [remark]


def test_folder_without_a_table_is_named(tmp_path):
    with pytest.raises(UserError, match=r"holds no table\.csv"):
        comparing.read(tmp_path)
