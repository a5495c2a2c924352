"""Small models of each kind with the same weights."""

import functools

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

import attnlab
from attnlab import see
from attnlab.masks import Causal
from tests.parameters import parameters

VOCABULARY, WIDTH, HEADS = 11, 16, 4
TOKENS = np.array([[1, 2, 3, 1, 2, 3, 4], [5, 4, 3, 2, 1, 0, 10]], np.int32)
OTHERS = (TOKENS * 3 + 1) % VOCABULARY

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def capture(model, variables, *args, want=("pattern",), rows=None, deterministic=None, **arrays):
    """Compiled `see.capture`, which is faster than running the operations one by one."""
    fixed = {"want": want, "rows": rows}
    fixed |= {} if deterministic is None else {"deterministic": deterministic}
    run = jax.jit(lambda *args, **arrays: see.capture(model, *args, **arrays, **fixed))
    return jax.device_get(run(variables, *args, **arrays))


def edited(model, variables, *args, edits, want=(), **arrays):
    """The results of `see.edited` for several edits, computed by one program."""

    @jax.jit
    def run(edits, variables, args, arrays):
        return [see.edited(model, variables, *args, edits=each, want=want, **arrays) for each in edits]

    return jax.device_get(run(edits, variables, args, arrays))


def random(*shape) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


class FlaxBlock(nn.Module):
    attention_fn: object = nn.dot_product_attention

    def attend(self, x):
        layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention_fn, name="attention")
        return layer(x, mask=nn.make_causal_mask(x[..., 0]))

    @nn.compact
    def __call__(self, x):
        x = x + self.attend(nn.LayerNorm(name="attention_norm")(x))
        return x + nn.Dense(WIDTH, name="mlp")(nn.gelu(nn.LayerNorm(name="mlp_norm")(x)))


class OurBlock(FlaxBlock):
    def attend(self, x):
        return attnlab.nn.MultiHeadAttention(HEADS, mask=Causal(), name="attention")(x)


class Flax(nn.Module):
    """Two blocks with Flax's own attention; a block computes x + attention(norm(x)), then x + mlp(norm(x))."""

    block = FlaxBlock

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        for layer in range(2):
            x = self.block(name=f"block_{layer}")(x)
        return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm(name="norm")(x))


class Ours(Flax):
    """`Flax` with attnlab's attention."""

    block = OurBlock


class Shared(nn.Module):
    """A block that is called twice."""

    @nn.compact
    def __call__(self, tokens):
        x, block = nn.Embed(VOCABULARY, WIDTH)(tokens), OurBlock(name="block")
        return nn.Dense(VOCABULARY)(block(block(x)))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention_norm, self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    @nnx.remat
    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.mlp(nnx.gelu(self.mlp_norm(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.block_0, self.block_1 = NnxBlock(rngs), NnxBlock(rngs)
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.block_1(self.block_0(self.embed(tokens)))
        return self.head(self.norm(x))


@functools.cache
def variables(model=None):
    """Weights with which attention is not uniform."""
    return parameters(model or Flax(), TOKENS)


def nnx_model():
    """`Nnx` with the weights of `variables()`."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Nnx(nnx.Rngs(0))))
    flat = [
        (path, variable.replace(functools.reduce(dict.get, path, variables()["params"]).reshape(variable.shape)))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def gpt(**fields):
    """A GPT of two layers, and its weights."""
    shape = {"vocab_size": VOCABULARY, "num_layers": 2, "num_heads": HEADS, "width": WIDTH, "context": 8}
    model = attnlab.nn.GPT.of(**{**shape, **fields})
    return model, variables(model)
