"""Checks and conversions that the modules share; each error is one line."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from attnlab.ops.checks import in_range, integers, known_keywords
from attnlab.ops.masks import Dense, Mask
from attnlab.types import Array

MaskLike = Mask | Bool[Array, "..."]  # a bool array counts as `masks.Dense`


def compact(call):
    """`flax.linen.compact`, with a one-line TypeError for an unknown argument that names the argument to use."""
    return nn.compact(known_keywords(call))


class MaskedModule(nn.Module):
    """Base class of the modules with a field `mask`: a bool array there becomes `masks.Dense`."""

    def __post_init__(self):
        if isinstance(self.mask, jax.Array | np.ndarray):
            self.mask = Dense(self.mask)  # compares and hashes by value, as `nn.jit` needs
        super().__post_init__()


def check_segments(segments, tokens, **excluded) -> None:
    """Raise ValueError for `segments` that are not integers `[B, T]`, or that come with an `excluded` argument."""
    if segments is None:
        return
    if not isinstance(segments, jax.Array | np.ndarray) or not jnp.issubdtype(segments.dtype, jnp.integer):
        kind = getattr(segments, "dtype", type(segments).__name__)
        raise ValueError(f"segments is {kind}, expected an integer array: each token's document number")
    integers("segments", segments)
    if jnp.shape(segments) != jnp.shape(tokens)[:2]:
        raise ValueError(
            f"segments has shape {jnp.shape(segments)}, expected {jnp.shape(tokens)[:2]}: each token's document number"
        )
    for name, value in excluded.items():
        if value is not None:
            raise ValueError(f"segments cannot be combined with {name}: they define positions in whole sequences")


def check_lengths(lengths, tokens, **excluded) -> None:
    """Raise ValueError for `lengths` that are not integers `[B]` up to T, or that come with an `excluded` argument."""
    if lengths is None:
        return
    if not jnp.issubdtype(jnp.result_type(lengths), jnp.integer) or jnp.shape(lengths) != jnp.shape(tokens)[:1]:
        raise ValueError(
            f"lengths has shape {jnp.shape(lengths)} and type {jnp.result_type(lengths)}, expected integers "
            f"{jnp.shape(tokens)[:1]}: the tokens in each sequence that are not padding"
        )
    integers("lengths", lengths)
    in_range("lengths", lengths, jnp.shape(tokens)[1] + 1, remedy="count the tokens of each sequence")
    for name, value in excluded.items():
        if value is not None:
            raise ValueError(f"lengths are for self-attention only: remove {name}, or pass a mask")


def check_tokens(config, tokens, caches, segments, lengths) -> None:
    """Raise ValueError for inputs that a model of this config cannot take."""
    if jnp.ndim(tokens) != 2:
        raise ValueError(f"tokens has shape {jnp.shape(tokens)}, expected [batch, length]: add the missing axis")
    in_range("tokens", tokens, config.vocab_size, remedy="encode the text with the model's tokenizer")
    check_segments(segments, tokens, caches=caches)
    check_lengths(lengths, tokens)
    if caches is None:
        return
    alone = hasattr(caches, "length")  # a single layer's cache, which is itself a tuple
    if alone or len(caches) != config.num_layers:
        actual = f"one {type(caches).__name__}" if alone else f"a sequence of {len(caches)}"
        remedy = f"make them with model.init_caches(batch={tokens.shape[0]})"
        raise ValueError(f"caches is {actual}, expected a sequence of num_layers = {config.num_layers}: {remedy}")
    for number, cache in enumerate(caches):
        config.layer(number).make(config).check_cache(cache, tokens.shape[0], config.width, f"caches[{number}]")


def check_outputs(config, tokens, caches, places, targets) -> None:
    """Raise ValueError for places or targets that do not fit the tokens."""
    predicted = tokens if places is None else places
    if places is not None:
        batch, length = jnp.shape(tokens)
        if jnp.ndim(places) != 2 or jnp.shape(places)[0] != batch:
            raise ValueError(f"places has shape {jnp.shape(places)}, expected [{batch}, places]")
        in_range("places", places, length, remedy="pass positions of tokens in this call")
    if targets is None:
        return
    if caches is not None:
        raise ValueError("targets are for whole sequences: remove caches")
    if jnp.shape(targets) != jnp.shape(predicted):
        raise ValueError(
            f"targets has shape {jnp.shape(targets)}, expected {jnp.shape(predicted)}, like tokens or places"
        )
    in_range("targets", targets, config.vocab_size, remedy="shift the tokens by one")
