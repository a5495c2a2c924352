"""Pretrained weights to start a run from: a Hugging Face model or another run, named by `config.init_from`."""

import dataclasses
from pathlib import Path

import jax

from attnlab.config import RunConfig, declared
from attnlab.data import tokenizers
from attnlab.support.errors import UserError
from attnlab.support.options import FieldError
from attnlab.training import state as states
from attnlab.training.loading import load_params, peek
from attnlab.training.workdir import Workdir

_SET_HERE = (*states.HOW, "context")  # model fields that the new run's config sets, not `init_from`


def completed(config: RunConfig, workdir: Workdir) -> tuple[RunConfig, tokenizers.Tokenizer | None]:
    """The config with the model fields from `config.init_from`, and the tokenizer in that folder.

    For an existing run in `workdir`, the fields come from its `config.json`, because `init_from` may be gone by now.
    The tokenizer is None for an existing run, or if the folder has none.

    Raises:
      UserError: `init_from` holds no usable model, or a model field is set to a different value than there.
    """
    if not config.init_from:
        if config.data.tokenizer == "pretrained":
            raise UserError(
                "config.init_from is missing, but config.data.tokenizer = 'pretrained' needs it: name a run or a "
                "folder with a Hugging Face model, with --config.init_from=PATH"
            )
        return config, None
    was, tokenizer = workdir.config, None
    if was is not None and was.init_from == config.init_from:
        has_tokenizer = was.data.tokenizer == "pretrained"
    else:
        was, tokenizer = _source(config)
        has_tokenizer = tokenizer is not None
    known, here, source_fields = declared(), config.fields, was.fields
    inherited = {name: x for name, x in source_fields.items() if name.startswith("model.") and not _is_set_here(name)}
    inherited |= {"data.tokenizer": "pretrained"} if has_tokenizer else {}
    inheritable = {name: None for name in here if name.startswith("model.") and not _is_set_here(name)}
    for name in inheritable | inherited:
        usual = known[name].default if name in known else None
        value = inherited.get(name, usual)
        if (set_ := here.get(name, value)) not in (value, usual):
            raise UserError(
                f"config.{name} = {set_!r} has no effect with config.init_from = {config.init_from}, where it is "
                f"{value!r}: remove it"
            )
    shape = was.changed({name: x for name, x in here.items() if name.startswith("model.") and _is_set_here(name)})
    data = dataclasses.replace(config.data, tokenizer=inherited.get("data.tokenizer", config.data.tokenizer))
    changes = {"model": shape.model, "vocab_size": shape.vocab_size, "scan": shape.scan, "data": data}
    try:
        return dataclasses.replace(config, **changes), tokenizer
    except FieldError as error:
        raise UserError(f"config.{error}") from None


def _is_set_here(name: str) -> bool:
    return name.rpartition(".")[2] in _SET_HERE


def _source(config: RunConfig) -> tuple[RunConfig, tokenizers.Tokenizer | None]:
    """The config and the tokenizer in `config.init_from`; UserError if a run cannot start from them."""
    source = Path(config.init_from)
    if not source.is_file() and not (source / "config.json").exists():
        raise UserError(
            f"config.init_from = {source} holds neither a run nor a Hugging Face model: name a workdir, or a "
            "folder with config.json, model.safetensors and tokenizer files"
        )
    _, tokenizer, init_config = peek(source)
    if init_config.model.position_encoding == "learned" and config.model.context > init_config.model.context:
        raise UserError(
            f"config.model.context = {config.model.context}, but the model in {source} has {init_config.model.context} "
            f"learned positions: set --config.model.context={init_config.model.context}, or less"
        )
    if tokenizer is None and config.data.tokenizer == "pretrained":
        raise UserError(
            f"config.init_from = {source} has no tokenizer: put tokenizer.json there, or vocab.json and "
            "merges.txt, or choose the one that the model was trained with, e.g. --config.data.tokenizer=byte"
        )
    return init_config, tokenizer


def params(config: RunConfig, like):
    """Load the parameters in `config.init_from` onto the devices; `like` has their shapes and shardings."""
    model, *_ = peek(config.init_from)
    if "positions" not in like:
        return load_params(Path(config.init_from), like)
    # Learned positions beyond the context are dropped.
    table = like["positions"]["embedding"]
    whole = jax.ShapeDtypeStruct((model.config.context, *table.shape[1:]), table.dtype, sharding=table.sharding)
    tree = load_params(Path(config.init_from), like | {"positions": {"embedding": whole}})
    kept = tree["positions"]["embedding"][: table.shape[0]]
    return tree | {"positions": {"embedding": jax.device_put(kept, table.sharding)}}
