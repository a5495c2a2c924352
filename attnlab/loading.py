"""What a finished or running run left: its model, parameters, tokenizer and config."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from attnlab.config import default, from_dict
from attnlab.data import tokenizers
from attnlab.errors import UserError
from attnlab.interop import huggingface
from attnlab.nn import GPT


class Run(NamedTuple):
    """A trained model and what belongs to it.

    Attributes:
      model: gives the logits of the next tokens, `model.apply(params, tokens)`.
      params: its variables, `{"params": …}`, float32.
      tokenizer: text to token ids and back; None for a GPT-2 without tokenizer files.
      config: of the run; for a GPT-2, the default with its model.
    """

    model: GPT
    params: dict
    tokenizer: object
    config: ConfigDict


def load(workdir: str | Path, step: int | str = "latest") -> Run:
    """Loads a run, or a GPT-2: where sampling, studies, notebooks and other projects start.

    Args:
      workdir: the folder that `python -m attnlab.train --workdir=…` wrote, or one with a GPT-2 of Hugging Face and its
        tokenizer files.
      step: "latest", "best" (the lowest validation loss), or the step of a checkpoint that is there.

    Returns:
      `Run(model, params, tokenizer, config)`, the parameters on the default device.

    Raises:
      UserError: the folder holds no run, no such checkpoint, or another run's tokenizer, or a GPT-2 that `from_hf`
        refuses.

    >>> import tempfile
    >>> from attnlab.interop.huggingface import save_hf
    >>> from attnlab.nn import GPT
    >>> model = GPT(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> folder = save_hf(Path(tempfile.mkdtemp()) / "gpt2", model, params)
    >>> model, params, tokenizer, config = load(folder)  # or load("runs/quickstart")
    >>> model.apply(params, jnp.array([[1, 2, 3]])).shape
    (1, 3, 10)
    """
    # Orbax and TFDS take seconds to load, which `import attnlab` must not.
    import jax
    import jax.numpy as jnp

    from attnlab.training.checkpoints import Checkpoints
    from attnlab.training.metrics import best_step, read
    from attnlab.training.state import make_model

    workdir = Path(workdir)
    if huggingface.is_hf(workdir):
        if step not in ("latest", "best"):
            raise UserError(f"{workdir} is a GPT-2 of Hugging Face, which has no checkpoint {step!r}: leave it out")
        _, tokenizer, config = peek(workdir)
        return Run(*huggingface.from_hf(workdir), tokenizer, config)
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


def peek(workdir: str | Path) -> tuple[GPT, tokenizers.Tokenizer | None, ConfigDict]:
    """What `load` gives, without the parameters: model, tokenizer and config; errors as there."""
    from attnlab.training.state import make_model, model_fields

    workdir = Path(workdir)
    if not huggingface.is_hf(workdir):
        saved = read_config(workdir)
        config, tokenizer = from_dict(saved), read_tokenizer(workdir, saved)
        return make_model(config, tokenizer.vocab_size), tokenizer, config
    model = huggingface.make_model(huggingface.read_config(workdir), str(workdir))
    tokenizer = huggingface.read_tokenizer(workdir)
    if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"{workdir} has a tokenizer of {tokenizer.vocab_size} tokens and a model of {model.vocab_size}: bring the "
            "model's own"
        )
    config = default()
    config.model.update(model_fields(model))
    config.data.tokenizer = "pretrained"
    return model, tokenizer, config


def read_config(workdir: Path) -> dict:
    """What `config.json` in a workdir holds.

    Raises:
      UserError: there is none, or it is damaged.
    """
    path = workdir / "config.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if "model_type" in saved and "corpus" not in saved:
            raise UserError(f"{workdir} holds a model of Hugging Face, and no run of attnlab: choose another folder")
        saved["corpus"]["sha256"]
        from_dict(saved)
        return saved
    except UserError:
        raise
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
