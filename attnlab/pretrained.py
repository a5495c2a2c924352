"""What a run starts from instead of random weights: a GPT-2, or another run, named by `config.init_from`."""

from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from attnlab import config as configs
from attnlab.data import tokenizers
from attnlab.errors import UserError
from attnlab.loading import load, peek, read_config
from attnlab.training import state as states


def completed(config: ConfigDict, workdir: Path) -> tuple[ConfigDict, tokenizers.Tokenizer | None, dict]:
    """A config with the shape of the model in `config.init_from`; as it is where that names nothing.

    Args:
      config: an `attnlab.config.completed` one; it is changed.
      workdir: of the run; where it has begun, what it wrote counts, and `init_from` need not be there any longer.

    Returns:
      The config, the tokenizer in `init_from` (None for a run that has begun, or where there is none), and what
      `config.json` shall hold besides: the fields as the experiment said them.

    Raises:
      UserError: neither a run nor a GPT-2, no tokenizer where one is asked for, another config than the run began with.
    """
    if not config.init_from:
        if config.data.tokenizer == "pretrained":
            raise UserError(
                "config.init_from is missing, whose tokenizer is asked for: name a run, or a folder with a GPT-2 of "
                "Hugging Face, by --config.init_from=PATH"
            )
        return config, None, {}
    said = {name: value for name, value in configs.fields(config).items() if name.startswith(("model.", "data.tok"))}
    tokenizer, saved = None, read_config(workdir) if (workdir / "config.json").exists() else {}
    if saved.get("init_from") == config.init_from:  # it need not be there any longer
        for name, before in saved.get("said", {}).items():
            if said.get(name) != before:
                raise configs.another(workdir, f"config.{name} = {said.get(name)!r}, there it was {before!r}")
        was = configs.from_dict(saved)
        shape, config.data.tokenizer = was.model.to_dict(), was.data.tokenizer
    else:
        source = Path(config.init_from)
        if not source.is_file() and not (source / "config.json").exists():
            raise UserError(
                f"config.init_from = {source} holds neither a run nor a GPT-2 of Hugging Face: name a workdir, or a "
                "folder with config.json, model.safetensors and tokenizer files"
            )
        model, tokenizer, _ = peek(config.init_from)
        shape = states.model_fields(model)
        if tokenizer is not None:
            config.data.tokenizer = "pretrained"
        elif config.data.tokenizer == "pretrained":
            raise UserError(
                f"config.init_from = {config.init_from} has no tokenizer: put tokenizer.json there, or vocab.json and "
                "merges.txt, or choose the one it was trained with, e.g. --config.data.tokenizer=byte"
            )
    context = config.model.context
    config.model.update({name: value for name, value in shape.items() if name not in states.HOW})
    # Learned positions may be cut, not continued; others are for any length.
    config.model.context = min(context, shape["context"]) if shape["positions"] == "learned" else context
    configs.check(config)
    return config, tokenizer, {"said": said}


def params(config: ConfigDict):
    """The parameters in `config.init_from`, on the host, for the model of `config`; errors as for `attnlab.load`."""
    tree = jax.tree.map(np.asarray, load(config.init_from).params["params"])
    if "positions" in tree:
        tree["positions"]["embedding"] = tree["positions"]["embedding"][: config.model.context]
    return tree
