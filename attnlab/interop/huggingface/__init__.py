"""Convert models between Hugging Face's `transformers` (files, folders, model objects) and `attnlab.nn.GPT`.

Supported are GPT-2, Llama (also Llama 2 and 3, SmolLM), Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text), OLMo 2, Phi-3,
DiffLlama, DeepSeek-V3 (without experts, read only) and, with recurrent layers, Qwen3-Next (without experts), OLMo
Hybrid, Mamba-2 and Bamba. The safetensors library reads and writes files; `to_hf` needs torch and returns its tensors.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp

from attnlab.data import tokenizers
from attnlab.interop import tensors
from attnlab.interop.huggingface import model_files
from attnlab.interop.huggingface.conversion import make_config, make_model
from attnlab.interop.huggingface.families import family_of
from attnlab.interop.huggingface.model_files import is_hf as is_hf
from attnlab.interop.huggingface.weights import load_state, prepared, unload_state
from attnlab.nn import GPT
from attnlab.support.errors import UserError
from attnlab.support.extras import require

__all__ = ["from_hf", "save_hf", "to_hf"]


def from_hf(
    source, config: Mapping | None = None, *, shardings: Mapping | Callable | None = None, dtype=jnp.float32
) -> tuple[GPT, dict]:
    """Load a language model of `transformers` as a `GPT` and its variables.

    Files are mapped into memory and read in pieces, directly into the parameters. Loading takes about the memory of the
    parameters, and each device gets only its share.

    Args:
      source: a folder with `config.json` and `model.safetensors` (or its shards), a `.safetensors` file alone, a model
        object such as a `LlamaForCausalLM`, or the state dict of such an object.
      config: the content of `config.json` or an object such as `LlamaConfig`; needed for a state dict, or a file
        without a `config.json` beside it.
      shardings: tree of `jax.sharding.Sharding` like the parameters, or a function from a tree of shapes to it; if
        its layers are stacked (`stack_layers`), the returned parameters have stacked layers too. None for the default
        device.
      dtype: type of the parameters.

    Returns:
      `(model, params)`, for `model.apply(params, tokens)`, with float32 logits `[B, T, V]`. The dropout rate is GPT-2's
      if its three rates agree, else 0.

    Raises:
      UserError: a missing or truncated file, a tensor that is missing, unexpected or of another shape, another kind of
        model, an option that `GPT` does not support, or safetensors is not installed.

    >>> model = GPT.of(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6, norm="rms", mlp="gated")
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> import tempfile
    >>> folder = save_hf(Path(tempfile.mkdtemp()) / "model", model, params)
    >>> again, its_params = from_hf(folder)
    >>> bool((again.apply(its_params, jnp.array([[1]])) == model.apply(params, jnp.array([[1]]))).all())
    True
    """
    model_files.check_dtype(dtype)
    if hasattr(config, "to_dict"):  # a config object of transformers
        config = config.to_dict()
    if hasattr(source, "state_dict"):
        name, state = type(source).__name__, source.state_dict()
        if config is None and not hasattr(source, "config"):
            raise UserError(f"{name} has no config, expected e.g. a LlamaForCausalLM: pass one as config=")
        config = source.config.to_dict() if config is None else config
    elif isinstance(source, Mapping):
        name, state = "the state dict", source
        if config is None:
            raise UserError(
                "a state dict does not contain the number of heads: pass config=, the content of config.json"
            )
    elif not isinstance(source, str | os.PathLike):
        raise UserError(f"from_hf got a {type(source).__name__}: expected a path, or e.g. a LlamaForCausalLM")
    else:
        name, path = str(source), Path(source)
        if config is None:
            config = model_files.read_config(path)
        state = None
    model, family = make_model(config, name), family_of(config, name)
    state = model_files.read_tensors(path) if state is None else state
    interleaved = bool(config.get("rope_interleave", True))
    options = {"interleaved": interleaved, "shardings": shardings, "dtype": dtype}
    return model, {"params": load_state(model, state, name, family, **options)}


def to_hf(model: GPT, params, *, model_type: str | None = None) -> dict:
    """The state dict of the equivalent model of `transformers`, as torch tensors for its `load_state_dict`.

    A model without biases gets biases of 0 where the family always has biases (GPT-2).

    Args:
      model: a `GPT` whose options a family supports.
      params: its variables `{"params": …}`.
      model_type: the family, "llama" etc.; None for the first that supports the model.

    Returns:
      Tensors by name, float32; a tied `lm_head.weight` is the embedding.

    Raises:
      UserError: an option that no family supports, parameters of another model, or torch is not installed.

    >>> model = GPT.of(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6, norm="rms", mlp="gated")
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> to_hf(model, params)["model.layers.0.self_attn.q_proj.weight"].shape
    torch.Size([8, 8])
    """
    family = make_config(model, model_type)["model_type"]
    return tensors.as_torch(unload_state(model, tensors.bare(params), family), "to_hf")


def save_hf(
    folder: str | Path,
    model: GPT,
    params,
    tokenizer=None,
    *,
    model_type: str | None = None,
    dtype=jnp.float32,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write a folder for `transformers` and `from_hf`: `config.json` and `model.safetensors`.

    Args:
      folder: a new folder.
      model, params, model_type: as for `to_hf`; torch is not needed.
      tokenizer: any tokenizer, written as `tokenizer.json`; None for none. The tokens that end a text go into
        `config.json`. Copy other files, such as a chat template, from the original model.
      dtype: type of the tensors, float32, bfloat16 or float16.
      max_shard_bytes: maximal size of a file, which is assembled in memory; larger models become several files with an
        index.

    Returns:
      The folder.

    Raises:
      UserError: as for `to_hf`; a folder that exists and is not empty.

    >>> import tempfile
    >>> model = GPT.of(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6, norm="rms", mlp="gated")
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> folder = save_hf(Path(tempfile.mkdtemp()) / "model", model, params)
    >>> sorted(path.name for path in folder.iterdir())
    ['config.json', 'model.safetensors']
    """
    model_files.check_dtype(dtype)
    folder = Path(folder).absolute()
    config = make_config(model, model_type) | {"dtype": jnp.dtype(dtype).name}
    table, params = prepared(model, tensors.bare(params), config["model_type"])
    contents = {"config.json": config}
    if tokenizer is not None:
        contents |= _tokenizer_files(tokenizer)
        config |= _special_tokens(tokenizer, contents["tokenizer.json"])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists: choose a new folder")
    table = sorted(table, key=lambda tensor: tensor.name)
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.unfinished")  # unique to this call
    try:
        unfinished.mkdir(parents=True)
        for file, content in contents.items():
            (unfinished / file).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        model_files.write_tensors(unfinished, table, tensors.arrays(table, params), dtype, max_shard_bytes)
        os.replace(unfinished, folder)  # atomic
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror or error}): choose another folder") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def read_tokenizer(path: Path, vocab_size: int | None = None) -> tokenizers.Tokenizer | None:
    """Load the tokenizer files in a folder, or beside a file, for a vocabulary of this size; None if there are none."""
    return _published().pretrained(path if path.is_dir() else path.parent, vocab_size)


def _published():
    require("tokenizers", "hf", "a Hugging Face tokenizer")
    from attnlab.data import published

    return published


# The usual names of the token that begins a text; GPT-2 has one token for the beginning and the end.
_BEGIN = ("<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>")


def _tokenizer_files(tokenizer) -> dict:
    content = _published().as_published(tokenizer)
    names = {i: name for name, i in _ids(content).items()}
    begin, ends = _special_tokens(tokenizer, content).values()
    special = {"bos_token": begin, "eos_token": ends[0] if isinstance(ends, list) else ends}
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    options |= {role: names[i] for role, i in special.items() if i is not None}
    return {"tokenizer.json": content, "tokenizer_config.json": options}


def _special_tokens(tokenizer, content: dict) -> dict:
    """The options `bos_token_id` and `eos_token_id` of a model's config, from its tokenizer."""
    ids, ends = _ids(content), tokenizer.end_of_text
    return {
        "bos_token_id": next((ids[name] for name in _BEGIN if name in ids), None),
        "eos_token_id": (ends[0] if len(ends) == 1 else list(ends)) if ends else None,
    }


def _ids(tokenizer: dict) -> dict[str, int]:
    """The id of each token of a `tokenizer.json`."""
    known = tokenizer["model"]["vocab"]
    known = known if isinstance(known, dict) else {token: i for i, (token, _) in enumerate(known)}
    return known | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
