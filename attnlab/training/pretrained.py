"""Pretrained weights to start a run from: a Hugging Face model or another run, named by `config.init_from`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from attnlab import config as configs
from attnlab.data import tokenizers
from attnlab.support.errors import UserError
from attnlab.training import state as states
from attnlab.training.loading import load_params, peek
from attnlab.training.workdir import read_config, said


def completed(config: ConfigDict, workdir: Path) -> tuple[ConfigDict, tokenizers.Tokenizer | None, dict]:
    """Set the model fields of a config, which is modified, to the fields of the model in `config.init_from`.

    Returns the config, the tokenizer in `init_from` (None for an existing run, or if there is none), and metadata for
    `config.json`: the fields as the experiment set them, under "said". An existing run in `workdir` takes the fields
    from its `config.json`, as `init_from` may have been deleted since.
    """
    if not config.init_from:
        if config.data.tokenizer == "pretrained":
            raise UserError(
                "config.init_from is missing, but config.data.tokenizer = 'pretrained' needs it: name a run or a "
                "folder with a Hugging Face model, by --config.init_from=PATH"
            )
        return config, None, {}
    given = {name: value for name, value in configs.fields(config).items() if name.startswith(("model.", "data.tok"))}
    tokenizer, saved = None, read_config(workdir) if (workdir / "config.json").exists() else {}
    if saved.get("init_from") == config.init_from:
        there = configs.fields(was := configs.from_dict(saved))
        for name, before in said(saved).items():
            if given.get(name) not in (before, there.get(name)) and not name.startswith(configs.FREE_TO_CHANGE):
                raise configs.another(workdir, f"config.{name} = {given.get(name)!r}, there it was {before!r}")
        shape, config.data.tokenizer = was.model.to_dict(), was.data.tokenizer
    else:
        source = Path(config.init_from)
        if not source.is_file() and not (source / "config.json").exists():
            raise UserError(
                f"config.init_from = {source} holds neither a run nor a Hugging Face model: name a workdir, or a "
                "folder with config.json, model.safetensors and tokenizer files"
            )
        model, tokenizer, _ = peek(config.init_from)
        shape = states.model_fields(model)
        if shape["positions"] == "learned" and config.model.context > model.context:
            raise UserError(
                f"config.model.context = {config.model.context}, but the model in {source} has {model.context} learned "
                f"positions: set --config.model.context={model.context}, or less"
            )
        if tokenizer is not None:
            config.data.tokenizer = "pretrained"
        elif config.data.tokenizer == "pretrained":
            raise UserError(
                f"config.init_from = {config.init_from} has no tokenizer: put tokenizer.json there, or vocab.json and "
                "merges.txt, or choose the one that the model was trained with, e.g. --config.data.tokenizer=byte"
            )
    context = config.model.context
    config.model.update({name: value for name, value in shape.items() if name not in states.HOW})
    # Of learned positions a run of an older version may have fewer than its experiment set.
    config.model.context = min(context, shape["context"]) if shape["positions"] == "learned" else context
    configs.check(config)
    return config, tokenizer, {"said": given}


def check_said(config: ConfigDict, said: Mapping[str, Any]) -> None:
    """Raise UserError for a field that a command line sets, where the model in `config.init_from` has another value."""
    source, own = Path(config.init_from), tuple(f"model.{name}" for name in (*states.HOW, "context"))
    taken = {name: x for name, x in said.items() if name.startswith(("model.", "data.tok")) and name not in own}
    if not config.init_from or not taken or not (source / "config.json").exists():  # as after its deletion
        return
    model, tokenizer, config = peek(source)
    config = config.copy_and_resolve_references()
    config.model.update(states.model_fields(model))
    there = configs.fields(config) | {"data.tokenizer": "pretrained"}
    for name, value in taken.items():
        if value != there[name] and (tokenizer is not None or name.startswith("model.")):
            raise UserError(
                f"config.{name} = {value!r} has no effect beside config.init_from = {source}, where it is "
                f"{there[name]!r}: leave it out"
            )


def saved_config(workdir: Path) -> ConfigDict | None:
    """The config that the run in a workdir was started with; None if there is no run."""
    if not (workdir / "config.json").exists():
        return None
    saved = read_config(workdir)
    config = configs.from_dict(saved)
    config.update_from_flattened_dict(said(saved))
    return config


def context_in_words(config: ConfigDict) -> str:
    """The context of a new run, and the context of the model in `config.init_from` where it is shorter."""
    context, before = config.model.context, peek(config.init_from)[0].context
    longer = f", longer than the {before} of its training" if context > before else ""
    return f"{context} tokens{longer}"


def params(config: ConfigDict, like):
    """Load the parameters in `config.init_from` onto the devices; `like` has their shapes and shardings."""
    model, *_ = peek(config.init_from)
    if "positions" not in like:
        return load_params(Path(config.init_from), like)
    # Learned positions beyond the context are dropped.
    table = like["positions"]["embedding"]
    whole = jax.ShapeDtypeStruct((model.context, *table.shape[1:]), table.dtype, sharding=table.sharding)
    tree = load_params(Path(config.init_from), like | {"positions": {"embedding": whole}})
    kept = tree["positions"]["embedding"][: table.shape[0]]
    return tree | {"positions": {"embedding": jax.device_put(kept, table.sharding)}}
