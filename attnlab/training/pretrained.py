"""Pretrained weights to start a run from: a Hugging Face model or another run, named by `config.init_from`."""

from pathlib import Path

import jax
from ml_collections import ConfigDict

from attnlab import config as configs
from attnlab.data import tokenizers
from attnlab.support.errors import UserError
from attnlab.training import state as states
from attnlab.training.loading import load_params, peek
from attnlab.training.workdir import read_config


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
        for name, before in _said(saved).items():
            if given.get(name) != before and not name.startswith(configs.FREE_TO_CHANGE):
                raise configs.another(workdir, f"config.{name} = {given.get(name)!r}, there it was {before!r}")
        was = configs.from_dict(saved)
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
        if tokenizer is not None:
            config.data.tokenizer = "pretrained"
        elif config.data.tokenizer == "pretrained":
            raise UserError(
                f"config.init_from = {config.init_from} has no tokenizer: put tokenizer.json there, or vocab.json and "
                "merges.txt, or choose the one that the model was trained with, e.g. --config.data.tokenizer=byte"
            )
    context = config.model.context
    config.model.update({name: value for name, value in shape.items() if name not in states.HOW})
    # Learned positions can be truncated but not extended; the others work for any length.
    config.model.context = min(context, shape["context"]) if shape["positions"] == "learned" else context
    configs.check(config)
    return config, tokenizer, {"said": given}


def saved_config(workdir: Path) -> ConfigDict | None:
    """The config that the run in a workdir was started with; None if there is no run."""
    if not (workdir / "config.json").exists():
        return None
    saved = read_config(workdir)
    config = configs.from_dict(saved)
    config.update_from_flattened_dict(_said(saved))
    return config


def _said(saved: dict) -> dict:
    """The fields of a saved config as its experiment set them."""
    said = saved.get("said", {})
    return said | ({"model.remat": configs.remat_name(said["model.remat"])} if "model.remat" in said else {})


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
