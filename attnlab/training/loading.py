"""Load a run, finished or still running: its model, parameters, tokenizer and config."""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn

from attnlab.config import Data, RunConfig
from attnlab.data import tokenizers
from attnlab.interop import huggingface
from attnlab.nn import GPT, versions
from attnlab.ops.masks import Mask
from attnlab.ops.score_mods import ScoreMods
from attnlab.support.errors import UserError
from attnlab.training.workdir import read_run, read_tokenizer


class Run(NamedTuple):
    """A trained model with its parameters, tokenizer and config.

    Attributes:
      model: `model.apply(params, tokens)` returns the logits of the next tokens.
      params: the variables `{"params": …}`, float32; with `config.optimizer.ema`, the average of the parameters.
      tokenizer: converts text to token ids and back; None for a Hugging Face model without tokenizer files.
      config: the run's config; for a Hugging Face model, the default config with that model.
    """

    model: GPT | nn.Module
    params: dict[str, Any]
    tokenizer: tokenizers.Tokenizer | None
    config: RunConfig


@versions.taken_once()
def load(
    workdir: str | Path,
    step: int | str = "latest",
    *,
    model: nn.Module | None = None,
    mask: Mask | None = None,
    score_mod: ScoreMods | None = None,
) -> Run:
    """Load a run, or a Hugging Face model of any family that `interop.huggingface` reads.

    Args:
      workdir: the folder of `attnlab train --workdir=…`, or of a Hugging Face model and its tokenizer files.
      step: "latest", "best" (the lowest validation loss), or the step of an existing checkpoint.
      model: the module that `attnlab.train.train(…, model=…)` trained; None for a GPT.
      mask, score_mod: as passed to `attnlab.train.train`; needed only for functions that are not importable here.

    To load a run with custom layers, first call `attnlab.nn.register` with their class, or
    `attnlab.nn.custom.import_file` with their file.

    Returns:
      `Run(model, params, tokenizer, config)`, with the parameters on the default device.

    Raises:
      UserError: no run, a missing or damaged checkpoint, another run's tokenizer, or a model that `from_hf` rejects.

    >>> import tempfile
    >>> from attnlab.interop.huggingface import save_hf
    >>> from attnlab.nn import GPT
    >>> model = GPT.of(vocab_size=10, num_heads=2, width=8, norm="rms", mlp="gated")
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> folder = save_hf(Path(tempfile.mkdtemp()) / "model", model, params)
    >>> model, params, tokenizer, config = load(folder)  # or load("runs/quickstart")
    >>> model.apply(params, jnp.array([[1, 2, 3]])).shape
    (1, 3, 10)
    """
    import jax
    import jax.numpy as jnp

    workdir = Path(workdir)
    if huggingface.is_hf(workdir):
        if step not in ("latest", "best"):
            raise UserError(f"{workdir} is a Hugging Face model, which has no checkpoint {step!r}: remove it")
        model, tokenizer, config = peek(workdir)
        return Run(model, huggingface.from_hf(workdir)[1], tokenizer, config)
    model, tokenizer, config = peek(workdir, model=model, mask=mask, score_mod=score_mod)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
    return Run(model, {"params": load_params(workdir, like, step)}, tokenizer, config)


def load_params(workdir: Path, like, step: int | str = "latest"):
    """Load the parameters of a run or a Hugging Face model; `like` has their shapes and shardings."""
    import jax

    if huggingface.is_hf(workdir):
        return huggingface.from_hf(workdir, shardings=jax.tree.map(lambda x: x.sharding, like))[1]["params"]
    with contextlib.closing(checkpoints_of(workdir)) as checkpoints:
        chosen = chosen_step(checkpoints, workdir, step)
        if why := checkpoints.damage(chosen):
            raise UserError(
                f"checkpoint {chosen} in {checkpoints.directory} is damaged ({why}): choose another of "
                f"{checkpoints.steps()}, or repeat the command that trained it"
            )
        return checkpoints.restore_params(chosen, like)


def checkpoints_of(workdir: Path):
    """The `Checkpoints` of a run; imports Orbax, which takes seconds."""
    from attnlab.training.checkpoints import Checkpoints

    return Checkpoints(read_run(workdir)[1].checkpoint.dir or workdir / "checkpoints")


def chosen_step(checkpoints, workdir: Path, step: int | str) -> int:
    """The step that "latest", "best" or a number stands for; UserError if it has no checkpoint."""
    from attnlab.training.metrics import best_step, read

    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{workdir} holds no checkpoint yet: train longer, or lower config.checkpoint.every")
    if step == "best":
        step = best_step(read(workdir / "metrics.jsonl"), steps) or steps[-1]
    named = {"latest": steps[-1]} | {str(each): each for each in steps}
    if str(step) not in named:
        raise UserError(f"{workdir} has no checkpoint {step!r}: choose latest, best, or one of {steps}")
    return named[str(step)]


def peek(workdir: str | Path, model=None, **parts) -> tuple[nn.Module, tokenizers.Tokenizer | None, RunConfig]:
    """(Model, tokenizer, config) as in `load`, without loading the parameters; `parts` are mask and score_mod."""
    from attnlab.training.overrides import Overrides, with_parts

    workdir = Path(workdir)
    if not huggingface.is_hf(workdir):
        saved, config = read_run(workdir)
        tokenizer, complete = read_tokenizer(workdir, saved), with_parts(config, **parts)
        if why := complete.difference(config):
            raise UserError(f"{workdir} holds another model ({why}): pass its own mask and score_mod, or None")
        Overrides(model).check_reads(saved, complete, workdir)
        if model is None:
            model = GPT(complete.over_tokens(tokenizer.vocab_size))
        elif isinstance(model, GPT):
            model = model.over_tokens(tokenizer.vocab_size)
        return model, tokenizer, complete
    model = huggingface.make_model(huggingface.model_files.read_config(workdir), str(workdir))
    tokenizer = huggingface.read_tokenizer(workdir, model.config.vocab_size)
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{workdir} has a tokenizer of {tokenizer.vocab_size} tokens and a model of {model.config.vocab_size}: "
            "provide the model's own tokenizer"
        )
    config = RunConfig(model=model.config, vocab_size=model.config.vocab_rows, data=Data(tokenizer="pretrained"))
    return model if tokenizer is None else model.over_tokens(tokenizer.vocab_size), tokenizer, config
