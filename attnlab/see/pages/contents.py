"""Runs, tokens, scores and effects, checked and converted for a page."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnlab.see.pages.encoding import entropies, shown
from attnlab.see.results import Effects, Run

TOLERANCE = 1e-3  # for bfloat16 weights near 0 and 1


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The tokens of one prompt as shown, and the weights of all heads."""

    queries: list[str]
    keys: list[str]
    weights: np.ndarray  # float32 [S, N, Tq, Tk], the N heads of all layers at S checkpoints


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a page."""

    steps: tuple[int | None, ...]  # (None,) for a run that is not a checkpoint
    paths: tuple[str, ...]
    heads: tuple[int, ...]  # number of heads in each layer
    prompts: list[Prompt]
    tables: dict[str, np.ndarray]  # by name [S, L, max H], NaN where a layer has fewer heads


def contents(
    runs: Run | Mapping[Any, Run], tokens: Sequence, scores: Any = None, effects: Effects | Mapping | None = None
) -> Contents:
    """The contents of a page, from the arguments of `page`."""
    by_step = dict(sorted(runs.items())) if isinstance(runs, Mapping) else {None: runs}
    if not by_step:
        raise ValueError("runs = {}: expected one run or more")
    first = next(iter(by_step.values()))
    paths = first.paths("pattern")
    patterns = [_patterns(run, step) for step, run in by_step.items()]
    shapes = [[layer.shape for layer in layers] for layers in patterns]
    if any(shape != shapes[0] or run.paths("pattern") != paths for shape, run in zip(shapes, by_step.values())):
        raise ValueError(f"patterns of runs differ, {shapes}: expected one model and the same prompts at each step")
    heads = tuple(layer.shape[1] for layer in patterns[0])
    prompts = _prompts(np.stack([np.concatenate(layers, axis=1) for layers in patterns]), tokens)
    tables = {"entropy": _mean_entropies(prompts, heads)}
    tables |= _tables("scores", _score_tables, scores, by_step, heads)
    tables |= _tables("effects", lambda effects: _effect_tables(effects, paths), effects, by_step, heads)
    steps = tuple(None if step is None else int(step) for step in by_step)
    return Contents(steps, paths, heads, prompts, tables)


def _patterns(run: Run, step) -> list[np.ndarray]:
    """Each layer's patterns, float32 `[B, H, Tq, Tk]`; layers may differ only in H."""
    where = "" if step is None else f" at step {step}"
    if not run.paths("pattern"):
        captured = ", ".join(run.values) or "nothing"
        raise ValueError(f"'pattern' was not captured{where}, only {captured}: name it in want=")
    layers = [np.asarray(run.values["pattern"][path], np.float32) for path in run.paths("pattern")]
    for path, layer in zip(run.paths("pattern"), layers):
        if layer.ndim != 4:
            raise ValueError(f"the pattern at {path}{where} has shape {layer.shape}: expected [B, H, Tq, Tk]")
        if not (layer.min(initial=0) >= -TOLERANCE and layer.max(initial=0) <= 1 + TOLERANCE):  # NaN fails as well
            raise ValueError(
                f"the pattern at {path}{where} is not within 0 … 1: expected weights without NaN; for a recurrence, "
                "use `see.shares`"
            )
    lengths = {(len(layer), *layer.shape[2:]) for layer in layers}
    if len(lengths) > 1:
        raise ValueError(f"layers differ in (B, Tq, Tk), {sorted(lengths)}: make a page for the layers of each shape")
    return layers


def _prompts(weights, tokens) -> list[Prompt]:
    """The prompts with their weights from `[S, B, N, Tq, Tk]`, each cut to the tokens of the prompt."""
    pairs = [_pair(prompt) for prompt in ([tokens] if _is_prompt(tokens) else tokens)]
    if len(pairs) != weights.shape[1]:
        raise ValueError(f"tokens has {len(pairs)} prompts: expected {weights.shape[1]}, one list per prompt")
    prompts = []
    for number, (queries, keys) in enumerate(pairs):
        for name, labels, length in (("queries", queries, weights.shape[3]), ("keys", keys, weights.shape[4])):
            if not 0 < len(labels) <= length:
                raise ValueError(f"prompt {number} has {len(labels)} tokens as {name}: expected 1 … {length}")
        cut = weights[:, number, :, : len(queries), : len(keys)]
        prompts.append(Prompt(list(map(shown, queries)), list(map(shown, keys)), cut))
    return prompts


def _is_prompt(tokens) -> bool:
    """Whether these are the tokens of one prompt: strings, or a tuple of queries and keys."""
    return isinstance(tokens, tuple) or all(isinstance(token, str) for token in tokens)


def _pair(prompt) -> tuple[Sequence[str], Sequence[str]]:
    """The queries and the keys of a prompt."""
    if all(isinstance(token, str) for token in prompt):
        return prompt, prompt
    if isinstance(prompt, tuple) and len(prompt) == 2:
        return prompt
    raise ValueError(f"tokens {prompt!r}: expected strings, or a tuple of two lists, the queries and the keys")


def _mean_entropies(prompts, heads) -> np.ndarray:
    """Mean entropies over the rows of all prompts, in nats: `[S, L, H]`."""
    rows = np.concatenate([entropies(prompt.weights) for prompt in prompts], axis=-1)
    table = np.full((rows.shape[0], len(heads), max(heads)), np.nan)
    at = 0
    for layer, count in enumerate(heads):
        table[:, layer, :count] = rows[:, at : at + count].mean(-1)
        at += count
    return table


def _tables(argument, read, value, by_step, heads) -> dict[str, np.ndarray]:
    """Tables `[S, L, H]` by name, from one argument: a value, or a mapping from steps to values for several runs."""
    if value is None:
        return {}
    if None in by_step:
        value = {None: value}
    elif not isinstance(value, Mapping) or set(value) != set(by_step):
        raise ValueError(f"{argument} by step: expected a mapping with the keys {list(by_step)}, like runs")
    read_at = [read(value[step]) for step in by_step]
    expected = (len(heads), max(heads))
    for tables in read_at:
        if tables.keys() != read_at[0].keys():
            raise ValueError(f"{argument} have the kinds {list(tables)}: expected {list(read_at[0])} at each step")
        for kind, table in tables.items():
            if table.shape != expected:
                raise ValueError(f"{argument}: {kind!r} has shape {table.shape}, expected [L, H] = {list(expected)}")
    return {str(kind): np.stack([tables[kind] for tables in read_at]) for kind in read_at[0]}


def _score_tables(scores) -> dict[str, np.ndarray]:
    tables = scores if isinstance(scores, Mapping) else scores.values
    return {kind: np.asarray(table, np.float64) for kind, table in tables.items()}


def _effect_tables(effects, paths) -> dict[str, np.ndarray]:
    if effects.axes != ("layer", "head") or effects.paths != paths:
        found = f"axes {effects.axes} at {effects.paths}"
        raise ValueError(f"effects have {found}: expected ('layer', 'head') at {paths}")
    return {"effect": np.asarray(effects.change, np.float64)}
