"""Patterns for pages, and readers of the data that a page holds, for the tests of pages."""

import base64
import json
import re
import zlib

import numpy as np

from attnlab.see.results import Effects, Run

PATHS = ("block_0/attention", "block_1/attention")


def softmax(logits) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def causal_patterns(seed: int, *shape: int, sharpness: float = 2.0) -> np.ndarray:
    """Random causal weights `[*shape, T]`; the last of `shape` is T."""
    logits = sharpness * np.random.default_rng(seed).normal(size=(*shape, shape[-1]))
    return softmax(np.where(np.tri(shape[-1], dtype=bool), logits, -np.inf))


def run_of(*layers) -> Run:
    """A run with patterns `[B, H, Tq, Tk]` of its layers."""
    paths = tuple(f"block_{layer}/attention" for layer in range(len(layers)))
    return Run(None, {"pattern": dict(zip(paths, layers))}, paths)


def checkpoints(steps, prompts: int = 1, heads: int = 3, length: int = 12) -> dict[int, Run]:
    """Runs of a model with two layers, by training step."""
    sharpness = {step: 1 + step / max(steps) for step in steps}
    return {
        step: run_of(*causal_patterns(step, 2, prompts, heads, length, sharpness=sharpness[step])) for step in steps
    }


def drifting(steps: int, layers: int, heads: int, length: int, width: int = 16) -> dict[int, Run]:
    """Patterns of queries and keys that move from one random draw to a sharper one, by step."""
    q0, k0, q1, k1 = np.random.default_rng(0).normal(size=(4, layers, 1, heads, length, width))
    visible, runs = np.tri(length, dtype=bool), {}
    for step, share in enumerate(np.linspace(0, 1, steps)):
        q, k = (1 - share) * q0 + 2 * share * q1, (1 - share) * k0 + 2 * share * k1
        runs[100 * step] = run_of(*softmax(np.where(visible, q @ k.swapaxes(-1, -2) / width**0.5, -np.inf)))
    return runs


def effects_of(values, baseline: float = 2.0) -> Effects:
    values = np.asarray(values)
    return Effects(values + baseline, ("layer", "head"), PATHS[: len(values)], baseline)


def data_of(page) -> dict:
    """The JSON that the page's script reads."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page.html, re.DOTALL)[1])


def records_of(page, prompt: int = 0) -> np.ndarray:
    """The bytes of a prompt, uint8 `[S, bytes]`."""
    data = data_of(page)
    differences = np.frombuffer(zlib.decompress(base64.b64decode(data["streams"][prompt])), np.uint8)
    return np.cumsum(differences.reshape(len(data["steps"]), -1), axis=0, dtype=np.uint8)
