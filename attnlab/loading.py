"""What a finished or running run left: its model, parameters, tokenizer and config."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from attnlab.config import from_dict
from attnlab.data import tokenizers
from attnlab.errors import UserError
from attnlab.nn import GPT


class Run(NamedTuple):
    """A trained model and what belongs to it.

    Attributes:
      model: gives the logits of the next tokens, `model.apply(params, tokens)`.
      params: its variables, `{"params": …}`, float32.
      tokenizer: text to token ids and back.
      config: of the run.
    """

    model: GPT
    params: dict
    tokenizer: object
    config: ConfigDict


def load(workdir: str | Path, step: int | str = "latest") -> Run:
    """Loads a run: where sampling, studies, notebooks and other projects start.

    Args:
      workdir: the folder that `python -m attnlab.train --workdir=…` wrote.
      step: "latest", "best" (the lowest validation loss), or the step of a checkpoint that is there.

    Returns:
      `Run(model, params, tokenizer, config)`, the parameters on the default device.

    Raises:
      UserError: the folder holds no run, no such checkpoint, or another run's tokenizer.

    >>> model, params, tokenizer, config = load("runs/quickstart")  # doctest: +SKIP
    """
    # Orbax and TFDS take seconds to load, which `import attnlab` must not.
    import jax
    import jax.numpy as jnp

    from attnlab.training.checkpoints import Checkpoints
    from attnlab.training.metrics import best_step, read
    from attnlab.training.state import make_model

    workdir = Path(workdir)
    saved = read_config(workdir)
    config = from_dict(saved)
    checkpoints = Checkpoints(config.checkpoint.dir or workdir / "checkpoints")
    try:
        steps = checkpoints.steps()
        if not steps:
            raise UserError(f"{workdir} holds no checkpoint yet: train longer, or lower config.checkpoint.every")
        chosen = steps[-1] if step == "latest" else step
        if step == "best":
            chosen = best_step(read(workdir / "metrics.jsonl"), steps) or steps[-1]
        if str(chosen) not in map(str, steps):
            raise UserError(f"{workdir} has no checkpoint {step!r}: choose latest, best, or one of {steps}")
        if why := checkpoints.damage(int(chosen)):
            raise UserError(
                f"checkpoint {chosen} in {checkpoints.directory} is damaged ({why}): choose another of {steps}, or "
                "repeat the command that trained it"
            )
        tokenizer = read_tokenizer(workdir, saved)
        model = make_model(config, tokenizer.vocab_size)
        shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
        return Run(model, {"params": checkpoints.restore_params(int(chosen), like)}, tokenizer, config)
    finally:
        checkpoints.close()


def read_config(workdir: Path) -> dict:
    """What `config.json` in a workdir holds.

    Raises:
      UserError: there is none, or it is damaged.
    """
    path = workdir / "config.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        saved["corpus"]["sha256"]
        from_dict(saved)
        return saved
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{workdir} holds no run (no config.json): train one with --workdir={workdir}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): restore it, or train in a new workdir") from error


def read_tokenizer(workdir: Path, saved: dict) -> tokenizers.Tokenizer:
    """The tokenizer in a workdir.

    Args:
      workdir: the folder of a run.
      saved: what its `config.json` holds.

    Raises:
      UserError: there is none, it is damaged, or it is another run's.
    """
    path = workdir / "tokenizer.json"
    tokenizer = tokenizers.load(path)
    fact, found = "tokenizer_sha256", hashlib.sha256(path.read_bytes()).hexdigest()
    if not saved.get(fact):  # a run from before config.json said it
        fact, found = "vocab_size", tokenizer.vocab_size
    if fact in saved and found != saved[fact]:
        raise UserError(
            f"{path} is another run's ({fact} {found}, expected {saved[fact]}): bring this run's tokenizer.json back"
        )
    return tokenizer
