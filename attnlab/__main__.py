"""Attention for JAX and Flax: train, sweep, compare, sample, see, export, plan, study, conform, measure.

    attnlab train --config=quickstart
    attnlab sweep --config=quickstart --grid config.optimizer.learning_rate=1e-3,3e-3 --grid config.seed=0,1
    attnlab compare --config=quickstart --variant "rotary:" --variant "alibi: model.positions=alibi"
    attnlab sample --workdir=runs/quickstart --prompt="The "
    attnlab see --workdir=runs/quickstart
    attnlab export --workdir=runs/gpt2_finetune --to=FOLDER
    attnlab plan --config=gpt2_124m --topology=v5e:4x4
    attnlab study heads
    attnlab conform jax.nn.dot_product_attention
    attnlab bench attention

`attnlab COMMAND --help` describes a command. `python -m attnlab` is the same program.
"""

import importlib
import sys

from attnlab.support import hugepages, status

COMMANDS = {
    "train": ("attnlab.train", "train a GPT on text"),
    "sweep": ("attnlab.sweep", "train on a grid of values, and compare the runs"),
    "compare": ("attnlab.compare", "train variants of a model, and say which are better"),
    "sample": ("attnlab.sample", "generate text with a trained model"),
    "see": ("attnlab.see.__main__", "show what a trained model attends to, as one HTML page"),
    "export": ("attnlab.export", "write a trained model in the format of transformers"),
    "plan": ("attnlab.plan", "compile a run for hardware that is not here: will it fit?"),
    "study": ("attnlab.study.__main__", "measure a claim about attention: table, figure, verdict"),
    "conform": ("attnlab.conform", "check an attention function against the specification"),
    "bench": ("attnlab.bench", "benchmark against other libraries"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    own_process = argv is None
    program, *words = sys.argv if own_process else argv
    name = words[0] if words else "--help"
    if own_process and name in ("train", "sample"):
        hugepages.restart("attnlab")
    if own_process:
        status.open_streams()
        status.end_when_interrupted()
    if name in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        print((__doc__ or "").strip() + "\n\nCommands:")
        print("\n".join(f"  {command:<{width}}  {summary}" for command, (_, summary) in COMMANDS.items()))
        return 0
    if name == "--version":
        from attnlab import __version__

        print(f"attnlab {__version__}")
        return 0
    if name not in COMMANDS:
        from attnlab.support.names import nearest

        close = nearest(name, COMMANDS)
        print(f"error: {name!r} is not a command{close}: use one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module = COMMANDS[name][0]
    if not own_process:
        return importlib.import_module(module).main([program, *words[1:]])
    if name == "train":
        status.importing(words)
    command = importlib.import_module(module)
    sys.argv = [program, *words[1:]]
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
