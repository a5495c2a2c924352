"""Pretrained weights to start a run from: a Hugging Face model or another run, named by `config.init_from`."""

from pathlib import Path

import flax.linen as nn
import jax
from ml_collections import ConfigDict

from attnlab import config as configs
from attnlab.data import tokenizers
from attnlab.support.errors import UserError
from attnlab.training import state as states
from attnlab.training.loading import load_params, peek
from attnlab.training.workdir import read_config


def completed(config: ConfigDict, workdir: Path) -> tuple[ConfigDict, tokenizers.Tokenizer | None]:
    """The config with the model fields of the model in `config.init_from`, and the tokenizer there.

    An existing run in `workdir` takes the fields from its `config.json`, as `init_from` may have been deleted since.
    The tokenizer is None for an existing run, or if there is none.

    Raises:
      UserError: a field that is neither its default nor the value in `init_from`.
    """
    if not config.init_from:
        if config.data.tokenizer == "pretrained":
            raise UserError(
                "config.init_from is missing, but config.data.tokenizer = 'pretrained' needs it: name a run or a "
                "folder with a Hugging Face model, by --config.init_from=PATH"
            )
        return config, None
    tokenizer, saved = None, read_config(workdir) if (workdir / "config.json").exists() else {}
    if saved.get("init_from") == config.init_from:
        was = configs.from_dict(saved)
        shape, has_tokenizer = configs.fields(was.model), was.data.tokenizer == "pretrained"
    else:
        model, tokenizer = _source(config)
        shape, has_tokenizer = configs.model_fields(model.config), tokenizer is not None
    whole = config.copy_and_resolve_references()
    set_here = (*states.HOW, "context")
    configs.set_fields(whole.model, {n: x for n, x in shape.items() if n.rpartition(".")[2] not in set_here})
    if has_tokenizer:
        whole.data.tokenizer = "pretrained"
    defaults, set_ = configs.fields(configs.default()), configs.fields(config)
    for name, value in configs.fields(whole).items():
        if set_[name] not in (value, defaults[name]):
            raise UserError(
                f"config.{name} = {set_[name]!r} has no effect beside config.init_from = {config.init_from}, where it "
                f"is {value!r}: leave it out"
            )
    configs.check(whole)
    return whole, tokenizer


def _source(config: ConfigDict) -> tuple[nn.Module, tokenizers.Tokenizer | None]:
    """The model and the tokenizer in `config.init_from`; UserError where a run cannot start from them."""
    source = Path(config.init_from)
    if not source.is_file() and not (source / "config.json").exists():
        raise UserError(
            f"config.init_from = {source} holds neither a run nor a Hugging Face model: name a workdir, or a "
            "folder with config.json, model.safetensors and tokenizer files"
        )
    model, tokenizer, _ = peek(source)
    if model.config.position_encoding == "learned" and config.model.context > model.config.context:
        raise UserError(
            f"config.model.context = {config.model.context}, but the model in {source} has {model.config.context} "
            f"learned positions: set --config.model.context={model.config.context}, or less"
        )
    if tokenizer is None and config.data.tokenizer == "pretrained":
        raise UserError(
            f"config.init_from = {source} has no tokenizer: put tokenizer.json there, or vocab.json and "
            "merges.txt, or choose the one that the model was trained with, e.g. --config.data.tokenizer=byte"
        )
    return model, tokenizer


def params(config: ConfigDict, like):
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
