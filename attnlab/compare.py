"""Train variants of a model side by side, each at its best learning rate, and say which are better.

    attnlab compare --config=quickstart --variant "rotary:" --variant "alibi: model.positions=alibi" --seeds=5
    attnlab compare --config=quickstart --variants=FILE.py --workdir=runs/mine
    attnlab compare --config=compare_positions
    attnlab compare --config=compare_tasks --tasks=recall,parity,copy
    attnlab compare --config=replicate_state_tracking

Each variant's learning rate is chosen on the first half of the held-out text, with seeds that are not used again. If
the best rate is the lowest or highest, one beyond it is tried too, at most --extensions times. The table has the losses
on the second half, over other seeds, with 95 % intervals. Paired differences from the first variant say whether each is
better, worse, or not significantly different, corrected for the number of variants. All runs train on the same number
of tokens, and runs with the same seed read them in the same order.

Each run has its own folder in --workdir. Runs that differ only in seed and learning rate share a process and its
compiled programs; on GPUs --together trains them as one program. The same command resumes a stopped or killed
comparison; if you add a variant, only its runs are trained. A failed run does not end the others, and a diverged run
counts at chance level. comparison.html in --workdir shows everything, with figures. table.csv and table.md are beside
it, or with --tasks in a folder for each task. An experiment file may define a dictionary PUBLISHED with results to
compare with, and a dictionary COMPARE with defaults of flags.
"""

import shlex
import sys
from pathlib import Path

from absl import flags

from attnlab import commands, compilation, experiments
from attnlab import config as configs
from attnlab.comparing import comparison, replication
from attnlab.comparing.report import TaskComparison
from attnlab.comparing.variants import SIZES, parse, size
from attnlab.config import RunConfig
from attnlab.nn import custom
from attnlab.support.errors import UserError
from attnlab.sweeping import training_runs
from attnlab.training import flops, precision

# Flags that an experiment may set in its dictionary COMPARE.
DEFAULT_OF_FILE = ("learning_rates", "extensions", "seeds", "tuning_seeds", "tasks", "match", "match_length", "jobs")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 if a run failed, 2 for a mistake, 128 + the number of a signal."""
    argv = list(sys.argv if argv is None else argv)
    return commands.run(_define, lambda values: _main(values, argv), __doc__, argv)


def _define(values, argv) -> None:
    commands.define_import(values, argv)
    commands.define_config(values, argv)
    text, whole = flags.DEFINE_string, flags.DEFINE_integer
    flags.DEFINE_multi_string("variant", [], 'a variant, as "NAME: FIELD=VALUE FIELD=VALUE"', flag_values=values)
    whence = "Python file with a dictionary VARIANTS; by default the file of --config"
    text("variants", None, whence, flag_values=values)
    meaning = "learning rates to choose from; by default 1/9, 1/3, 1 and 3 times the config's"
    flags.DEFINE_list("learning_rates", None, meaning, flag_values=values)
    meaning = "how often a variant tries one more learning rate while its best one is the lowest or highest"
    whole("extensions", 2, meaning, 0, flag_values=values)
    whole("seeds", 5, "number of seeds per variant, starting at config.seed", 2, flag_values=values)
    meaning = "how many other seeds choose the learning rate; by default 3 if runs are trained together, else 1"
    whole("tuning_seeds", None, meaning, 1, flag_values=values)
    meaning = "size to match, by the width of the feed-forward layers, or of the model for state"
    flags.DEFINE_enum("match", "none", ["none", *SIZES], meaning, flag_values=values)
    meaning = "number of tokens at which --match=state compares decoding states; by default the context"
    whole("match_length", None, meaning, 1, flag_values=values)
    meaning = f"tasks, with a table for each: any of {', '.join(comparison.TASKS)}"
    flags.DEFINE_list("tasks", [], meaning, flag_values=values)
    training_runs.define(values)
    text("workdir", None, "folder of the comparison; by default runs/CONFIG-comparison", flag_values=values)
    meaning = "check custom layers with attnlab.testing.check_layer before any run"
    flags.DEFINE_enum("check", "on", ["on", "off"], meaning, flag_values=values)
    flags.DEFINE_bool("dry_run", False, "list the runs and their estimated time, start none", flag_values=values)


def _main(values, argv: list[str]) -> int:
    compilation.fuse_no_sums()  # because checks of layers compute in this process
    config, name = commands.config_of(values)
    file = values.variants or commands.given(argv, "config")[-1].partition(":")[0]
    _set_defaults(values, file)
    has_variants = bool(values.variants or not values.variant)  # otherwise --variant defines them all
    variants = parse(values.variant, file if has_variants else None)
    published = replication.published(file, list(variants)) if has_variants else {}
    try:
        rates = [float(rate) for rate in values.learning_rates or ()]
    except ValueError as error:
        raise UserError(f"--learning_rates={','.join(values.learning_rates)}: expected numbers") from error
    runner = training_runs.checked(values.jobs, values.together)
    arguments = {name: values[name].value for name in ("extensions", "seeds", "match", "match_length")}
    arguments["tuning_seeds"] = values.tuning_seeds or comparison.default_tuning_seeds(values.together, values.jobs)
    arguments |= {"learning_rates": rates, "tasks": values.tasks, "published": published}
    arguments["known_tasks"] = experiments.dictionary(file, "TASKS")
    folder = Path(values.workdir or f"runs/{name}-comparison")
    parts = comparison.parts(config, {*commands.changes(values)}, variants, folder, **arguments)
    used = [layer for part in parts for variant in part.variants for layer in part.config_of(variant).model.used]
    custom.check_used(values["import"].value, used)
    if runner["jobs"]:
        custom.to_load([part.config_of(variant).model for part in parts for variant in part.variants])
    check = values.check == "on"
    if values.dry_run:
        if check:
            comparison.check_layers(parts)
        return _print_runs(parts)

    def command(seeds: int) -> str:
        others = commands.without(commands.with_flag_files(argv), "seeds")
        words = argv[1:] if seeds == values.seeds else [*others[1:], f"--seeds={seeds}"]
        return shlex.join(["attnlab", "compare", *words])

    try:
        result = comparison.run(parts, folder, check=check, command=command, **runner)
    except KeyboardInterrupt as stopped:
        return 128 + stopped.args[0] if stopped.args else 130
    print(f"the report is {result.page}")
    return int(bool(result.failed))


def _set_defaults(values, file: str) -> None:
    """Set the flags in the dictionary COMPARE of a file, unless the command line sets them."""
    for name, value in experiments.dictionary(file, "COMPARE").items():
        if name not in DEFAULT_OF_FILE:
            raise UserError(f"{file}: COMPARE has {name!r}: expected some of {', '.join(DEFAULT_OF_FILE)}")
        try:
            if not values[name].present:
                words = value if isinstance(value, list | tuple) else [value]
                values[name].parse(",".join(map(str, words)))
        except flags.IllegalFlagValueError as error:
            raise UserError(f"{file}: COMPARE: {commands.one_line(error)}") from error


def _print_runs(parts: list[TaskComparison]) -> int:
    """Print the runs of a comparison and an estimate of their time."""
    count = seconds = more = 0
    for part in parts:
        base = part.protocol.config
        print(f"--- {part.name or 'text'}: {' '.join(configs.words(base, RunConfig()))}")
        vocab_size = comparison.vocab_size(part)
        for variant in part.variants:
            config = part.config_of(variant)
            print(f"{variant.name}: {' '.join(configs.words(config, base))}")
            points = [*part.protocol.tuning(variant), *part.protocol.final(variant, part.protocol.rates[0])]
            for point in points[: -len(part.protocol.seeds)]:
                print(f"  tuning: {point.name}")
            best = "the best" if len(part.protocol.rates) > 1 else f"{part.protocol.rates[0]:g}"
            print(f"  learning rate {best}: seeds {', '.join(map(str, part.protocol.seeds))}")
            work = config.steps * config.batch_size * config.model.context * size(config, vocab_size, "flops")
            seconds += len(points) * work / (flops.peak(precision.resolved(config.precision)) / 3)
            count += len(points)
            more += part.protocol.extensions * len(part.protocol.tuning_seeds) * (len(part.protocol.rates) > 1)
    extended = f", and up to {more} more if a best learning rate is at an edge" if more else ""
    print(f"{count} runs{extended}, about {seconds / 60:.0f} min of training at a third of this device's peak speed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
