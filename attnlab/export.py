"""Write a trained model as a folder for `transformers`, and for other programs that read its format.

    attnlab export --workdir=runs/gpt2_finetune --to=FOLDER
    attnlab export --workdir=runs/gpt2_finetune --to=FOLDER --step=best --dtype=bfloat16

The folder has config.json and model.safetensors and, if the model has a tokenizer, tokenizer.json and
tokenizer_config.json. `AutoModelForCausalLM.from_pretrained(FOLDER)` loads it, and so do `attnlab sample`, `see`, and
`config.init_from`. The model must belong to a family of transformers: gpt2_124m and llama_tiny do, and so do runs
initialised from models of such a family.
`python -m attnlab.export` is the same command.
"""

import sys
from pathlib import Path

from absl import flags

from attnlab import commands
from attnlab.interop.huggingface import save_hf
from attnlab.nn import custom
from attnlab.support.errors import UserError
from attnlab.training.loading import load

_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return commands.run(_define, _main, __doc__, argv)


def _define(values, argv):
    commands.define_import(values, argv)
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    flags.DEFINE_string("to", None, "new folder for the model", flag_values=values)
    flags.DEFINE_string("step", "latest", "checkpoint: latest, best, or a step", flag_values=values)
    flags.DEFINE_enum("dtype", "float32", _DTYPES, "type of the tensors", flag_values=values)
    flags.DEFINE_string("model_type", None, "family, e.g. mistral; by default the first that fits", flag_values=values)


def _main(values) -> int:
    for name, meaning in (("workdir", "the folder of a run, e.g. --workdir=runs/quickstart"), ("to", "a new folder")):
        if not values[name].value:
            raise UserError(f"--{name} is missing: name {meaning}")
    run = load(Path(values.workdir), values.step)
    custom.check_used(values["import"].value, run.model.config.used)
    options = {"model_type": values.model_type, "dtype": values.dtype}
    folder = save_hf(Path(values.to), run.model, run.params, run.tokenizer, **options)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{values.to}: {', '.join(sorted(file.name for file in folder.iterdir()))} ({size / 1e6:,.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
