"""Train variants of a model side by side, each at its best learning rate, and tell which are better.

    attnlab compare --config=quickstart --variant "rotary:" --variant "alibi: model.positions=alibi" --seeds=5
    attnlab compare --config=quickstart --variants=FILE.py --workdir=runs/mine
    attnlab compare --config=compare_positions
    attnlab compare --config=compare_tasks --tasks=recall,parity,copy
    attnlab compare --config=replicate_state_tracking

Each variant's learning rate is chosen on the first half of the held-out text, with a seed that is not used again. The
table has the losses on the second half, over fresh seeds, with their 95 % intervals, and paired differences from the
first variant: better, worse, or not told apart, corrected for the number of variants. All runs see the same number of
tokens, and runs of one seed see them in the same order.

Each run has a workdir of its own in --workdir. Runs that differ in seed and learning rate alone share a process and
its programs; on GPUs --together trains them as one program. The same command goes on where it was stopped or killed; a
variant that is added is trained alone. A run that fails does not end the others, and one that diverges counts with the
loss of chance. comparison.html in --workdir is a page of everything, figures included; table.csv and table.md are
beside it, with --tasks in a folder for each. An experiment file may have a dictionary PUBLISHED of results to
compare with, and a dictionary COMPARE of flags.
"""

import math
import sys
import tempfile
from pathlib import Path

from absl import flags

from attnlab import commands, train
from attnlab.comparing import measuring, page, parts, replication, report, table
from attnlab.comparing import protocol as protocols
from attnlab.comparing.parts import Part
from attnlab.comparing.protocol import FACTORS, Protocol
from attnlab.comparing.variants import SIZES, Variant, config_of, fields_of_file, matched, parse, size
from attnlab.data.tasks import named
from attnlab.nn import custom
from attnlab.support import workers
from attnlab.support.errors import UserError
from attnlab.support.files import read_json
from attnlab.sweep import shared_options
from attnlab.sweeping import grid, training_runs
from attnlab.testing.layer import check_layer
from attnlab.training import flops, precision
from attnlab.training import text as texts
from attnlab.training.workdir import read_config

MARKER = "comparison.json"
FLAGS = (
    "variant", "variants", "learning_rates", "seeds", "tuning_seeds", "tasks", "match", "match_length", "jobs",
    "together", "workdir", "dry_run", "nodry_run", "check",
)  # fmt: skip
# Of which an experiment's dictionary COMPARE may have other values, in the words of a command line.
DEFAULT_OF_FILE = ("learning_rates", "seeds", "tuning_seeds", "tasks", "match", "match_length", "jobs")
MEASURES = {"loss": "Losses in nats per token", "accuracy": "Accuracies: shares of right answers"}
# Where the user does not say otherwise: samples would be compiled for each variant.
DEFAULTS = ("--config.sample.length=0", "--config.log.tensorboard=False")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 if a run failed, 2 for a mistake, 128 + the number of a signal."""
    argv = list(sys.argv if argv is None else argv)
    return commands.run(_define, lambda values: _main(values, argv), __doc__, argv)


def _define(values, argv) -> None:
    commands.define_import(values, argv)
    commands.define_config(values, argv)
    text, whole = flags.DEFINE_string, flags.DEFINE_integer
    flags.DEFINE_multi_string("variant", [], '"NAME: FIELD=VALUE FIELD=VALUE"', flag_values=values)
    whence = "Python file with a dictionary VARIANTS; by default the file of --config"
    text("variants", None, whence, flag_values=values)
    meaning = "learning rates to choose from; by default 1/9, 1/3, 1 and 3 times the config's"
    flags.DEFINE_list("learning_rates", None, meaning, flag_values=values)
    whole("seeds", 5, "fresh seeds of each variant", 2, flag_values=values)
    whole("tuning_seeds", 1, "seeds on which the learning rate is chosen, not used again", 1, flag_values=values)
    meaning = "size that all variants have in common, by a change of width"
    flags.DEFINE_enum("match", "none", ["none", *SIZES], meaning, flag_values=values)
    meaning = "length of the text whose decoding state --match=state compares; by default the context"
    whole("match_length", None, meaning, 1, flag_values=values)
    meaning = f"tasks, with a table for each: some of {', '.join(parts.TASKS)}"
    flags.DEFINE_list("tasks", [], meaning, flag_values=values)
    training_runs.define(values)
    text("workdir", None, "folder of the comparison; by default runs/CONFIG-comparison", flag_values=values)
    meaning = "check custom layers before any run, by attnlab.testing.check_layer"
    flags.DEFINE_enum("check", "on", ["on", "off"], meaning, flag_values=values)
    flags.DEFINE_bool("dry_run", False, "list the runs and how long they may take, start none", flag_values=values)


def _main(values, argv: list[str]) -> int:
    config, name = commands.config_of(values)
    options = shared_options(argv, FLAGS)
    experiment = commands.given(argv, "config")[-1].partition(":")[0]
    file = values.variants or (None if values.variant else experiment)
    _set_defaults(values, file)
    variants = parse(values.variant, file)
    if len(variants) < 2:
        raise UserError('one variant: name another to compare it with, e.g. --variant "alibi: model.positions=alibi"')
    together = training_runs.checked(values)
    if values.match_length is not None and values.match != "state":
        raise UserError("--match_length is of --match=state: leave it out")
    folder = Path(values.workdir or f"runs/{name}-comparison")
    defaults = [one for one in DEFAULTS if not any(word.startswith(one.partition("=")[0]) for word in options)]
    protocol, given = _protocol(values, config, (*options, *defaults)), (*options, *defaults)
    published = replication.published(file, variants) if file else {}
    tasks = values.tasks or list(published)
    found = parts.chosen(tasks, file, options) if tasks else {"": ()}
    made = [
        _part(values, name, folder, protocol._replace(options=(*given, *more)), variants, published.get(name))
        for name, more in found.items()
    ]
    compared = [config_of([*part.protocol.options, *each.options]) for part in made for each in part.variants]
    custom.check_used(values["import"].value, [layer for config in compared for layer in config.model.used])
    if values.check == "on":
        _check_own(compared)
    if values.dry_run:
        return _print_runs(made)
    content = {"variants": {variant.name: variant.options for variant in variants}, "options": options}
    content |= {"tasks": list(tasks)} if tasks else {}
    clock = training_runs.Clock(sum(len(_tuning(part)) + len(variants) * len(protocol.seeds) for part in made))
    try:
        with training_runs.claimed(folder, MARKER, content) as lock:
            runner = training_runs.Runner(values.jobs, together, lock, clock)
            compared = [_compare(part, runner) for part in made]
            sections = [section for found, _ in compared for section in found]
            print(f"the page of all is {page.write(folder, name, sections)}")
            return int(any(failed for _, failed in compared))
    except workers.Interrupted as stopped:
        return 128 + stopped.args[0]


def _check_own(found) -> None:
    """Raise UserError for the first failed check of a custom layer."""
    checked = set()
    for config in found:
        model = config.changed({"precision": "float32", "model.dropout": 0.0}).model
        for layer in model.used:
            if custom.is_custom(layer.kind) and layer.kind not in checked:
                checked.add(layer.kind)
                if faults := check_layer(layer.make(model), model.width):
                    raise UserError(f"{layer.kind}: {faults[0]}: fix it, or skip this check with --check=off")
                print(f"{layer.kind}: causal, the same in pieces, padded and stacked, and packed if it may be")


def _set_defaults(values, file: str | None) -> None:
    """Set the flags that the dictionary COMPARE of a file names, and the command line does not."""
    for name, value in (fields_of_file(file, "COMPARE") if file else {}).items():
        if name not in DEFAULT_OF_FILE:
            raise UserError(f"{file}: COMPARE has {name!r}: expected some of {', '.join(DEFAULT_OF_FILE)}")
        try:
            if not values[name].present:
                values[name].parse(value)
        except flags.IllegalFlagValueError as error:
            raise UserError(f"{file}: COMPARE: {commands.one_line(error)}") from error


def _part(values, name: str, folder: Path, protocol: Protocol, variants: list[Variant], published) -> Part:
    """A part with its measure, and widths that match; its mistakes are told before anything starts."""
    is_task = named.parse(config_of(protocol.options).data.name)
    protocol = protocol._replace(measure="accuracy" if is_task else "loss")
    if values.match != "none":
        vocab_size = _vocab_size(protocol, variants[0])
        variants = matched(variants, protocol.options, vocab_size, values.match, values.match_length)
    for variant in variants:
        protocol.final(variant, protocol.rates[0])
    return Part(name, folder / grid.folder_name(name) if name else folder, protocol, variants, published)


def _tuning(part: Part) -> list:
    return [point for variant in part.variants for point in part.protocol.tuning(variant)]


def _protocol(values, config, options: tuple[str, ...]) -> Protocol:
    try:
        rates = [float(rate) for rate in values.learning_rates or ()]
    except ValueError as error:
        raise UserError(f"--learning_rates={','.join(values.learning_rates)}: expected numbers") from error
    rates = rates or [float(f"{factor * config.optimizer.learning_rate:.2g}") for factor in FACTORS]
    if len(set(rates)) < len(rates) or min(rates) <= 0:
        raise UserError(f"--learning_rates={','.join(map(str, rates))}: expected different numbers above 0")
    first, fresh = config.seed, config.seed + values.tuning_seeds
    seeds = tuple(range(fresh, fresh + values.seeds))
    return Protocol(options, tuple(sorted(rates)), tuple(range(first, fresh)), seeds)


def _compare(part: Part, runner: training_runs.Runner) -> tuple[list[page.Section], bool]:
    """Train, measure and report a part: its sections of the page, and whether a run failed."""
    name, folder, protocol, variants, published = part
    if name:
        print(f"--- {name}")
        folder.mkdir(exist_ok=True)
    failed = _train(_tuning(part), folder, runner)
    rates = {variant.name: protocols.chosen_rate(protocol, variant, folder) for variant in variants}
    final = {variant.name: protocol.final(variant, rates[variant.name][0]) for variant in variants}
    failed |= _train([point for points in final.values() for point in points], folder, runner)
    measured = _measure(final, folder, runner.lock)
    rows = table.rows(protocol, variants, folder, rates, measured)
    print(table.as_text(table.cells(rows)))
    notes = _notes(protocol, rows, runner.jobs, _together(final, folder))
    print("\n".join(notes))
    table.write(rows, folder, notes)
    print(f"{table.TABLE} and {table.TEXT} are in {folder}")
    sections = [report.section(part, rows, notes, final, measured)]
    if published:
        sections.append(_replicate(part, published, final, measured))
    return sections, bool(failed)


def _replicate(part: Part, published: replication.Published, final, measured) -> page.Section:
    """Set a part's results beside the published ones."""
    results, step = replication.results(published, part.protocol, part.folder, final, measured)
    config = final[part.variants[0].name][0].config
    task = named.parse(config.data.name)
    chance = task.chance if task else math.log(_vocab_size(part.protocol, part.variants[0]))
    rows = replication.rows(published, results, chance, step)
    notes = replication.notes(published, part.protocol, config)
    print("\n".join([table.as_text(replication.cells(rows)), *notes]))
    replication.write(rows, notes, part.folder)
    return replication.section(part.name, rows, notes)


def _train(points, folder: Path, runner: training_runs.Runner) -> dict[str, str]:
    ended = {point.name for point in points if protocols.has_ended(point, folder)}
    failed = runner.train(points, ended, folder)
    return {name: error for name, error in failed.items() if not protocols.diverged(folder / name)}


def _measure(final, folder: Path, lock: int) -> dict[str, dict]:
    """The measurements of each variant that has a finished run, made in one process after another."""
    logs, files, words = folder / training_runs.LOGS, {}, {}
    for name, points in final.items():
        workdirs = [folder / point.name for point in points if train.is_finished(point.config, folder / point.name)]
        if not workdirs:
            continue
        files[name] = logs / f"{workdirs[0].name}-{protocols.digest(workdirs)}.json"
        if not files[name].exists():
            code = (f"--import={file}" for file in custom.files())
            words[f"measuring {workdirs[0].name}"] = [measuring.__name__, *code, str(files[name]), *map(str, workdirs)]
    for ended in workers.run(words, 1, logs, lock, lambda name: print(name, flush=True)):
        if ended.error:
            print(f"{ended.name} failed: {ended.error} (see {logs})", file=sys.stderr)
    return {name: read_json(file) for name, file in files.items() if file.exists()}


def _together(final, folder: Path) -> set[int]:
    """With how many others, itself included, a run was trained as one program."""
    workdirs = [folder / point.name for points in final.values() for point in points]
    return {read_config(workdir).get("together", 1) for workdir in workdirs if (workdir / "config.json").exists()}


def _notes(protocol: Protocol, rows, jobs: int, together: set[int]) -> list[str]:
    rates, tuning = ", ".join(f"{rate:g}" for rate in protocol.rates), len(protocol.tuning_seeds)
    on = "text" if protocol.measure == "loss" else "sequences"
    chosen = f"s {rates}, chosen with {tuning} other seed{'s' if tuning > 1 else ''} on other {on}"
    notes = [
        f"{MEASURES[protocol.measure]}, means of {len(protocol.seeds)} seeds ± 95 % intervals; differences are paired "
        f"by seed, with simultaneous intervals for {len(rows) - 1} variant{'s' if len(rows) > 2 else ''}; a verdict is "
        f"an interval without 0. "
        f"Learning rate{chosen if len(protocol.rates) > 1 else f' {rates}, the same for all'}."
    ]
    if any(row["verdict"] == "not told apart" for row in rows):
        notes.append(
            "Not told apart: 'detectable' is the smallest difference that these seeds show with probability 80 %; "
            "'seeds needed' would show the difference found, by the spread of these seeds and the ends of its interval."
        )
    if any(row["learning_rate_at_edge"] for row in rows):
        notes.append("(edge): the best learning rate is the smallest or largest one: widen --learning_rates.")
    if any(not row["comparable"] for row in rows):
        notes.append("Not comparable: no width makes its size equal to the first variant's within 5 %.")
    if protocol.measure == "accuracy" and rows[0].get("accuracy_2x") is not None:
        notes.append("Accuracies at 2× and more are of the answers in the second half of sequences of that length.")
    if any(row["conforms"] is not None for row in rows):
        notes.append(
            "Conforms: the largest error of a variant's operators against the specification, in units of its bound."
        )
    notes += [f"{row['variant']}: its operators do not conform." for row in rows if row["conforms"] is False]
    if jobs > 1:
        notes.append(f"Loss at equal time and tokens/s are of --jobs={jobs}: comparable with --jobs=1 alone.")
    if together - {1}:
        counts = " or ".join(map(str, sorted(together)))
        notes.append(f"Loss at equal time and tokens/s are of {counts} runs together: comparable for one number alone.")
    return notes


def _print_runs(made: list[Part]) -> int:
    """The runs of a comparison, and an estimate of their time."""
    count = seconds = 0
    for part in made:
        protocol, variants = part.protocol, part.variants
        if part.name:
            print(f"--- {part.name}: {' '.join(protocol.options)}")
        vocab_size = _vocab_size(protocol, variants[0])
        available = flops.peak(precision.resolved(config_of(protocol.options).precision))
        for variant in variants:
            config = config_of([*protocol.options, *variant.options], variant.name)
            choosing = protocol.tuning(variant)
            points = [*choosing, *protocol.final(variant, protocol.rates[0])]
            estimate = protocols.estimate(points, size(config, vocab_size, "flops"), available)
            seconds, count = seconds + estimate, count + len(points)
            print(f"{variant.name}: about {estimate / 60:.0f} min  {' '.join(variant.options)}")
            for point in choosing:
                print(f"  choosing: {point.name}")
            best = f"at the best of {len(protocol.rates)} learning rates" if choosing else f"at {protocol.rates[0]:g}"
            print(f"  {best}: seeds {', '.join(map(str, protocol.seeds))}")
    print(f"{count} runs, about {seconds / 60:.0f} min one after another, at a third of this device's speed")
    return 0


def _vocab_size(protocol: Protocol, variant: Variant) -> int:
    config = config_of([*protocol.options, *variant.options], variant.name)
    with tempfile.TemporaryDirectory() as nowhere:
        return texts.load(config, texts.Workdir(Path(nowhere) / "new")).tokenizer.vocab_size


if __name__ == "__main__":
    sys.exit(main())
