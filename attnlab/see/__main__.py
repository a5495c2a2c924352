"""Show what a trained model attends to, in one HTML page that works offline.

    attnlab see --workdir=runs/quickstart
    attnlab see --workdir=runs/quickstart --checkpoints=all --prompt="The class " --prompt="def f(x):"
    attnlab see --workdir=gpt2 --prompt="When Mary and John went to the store" --out=mary.html

For --checkpoints=all, train with --config.checkpoint.history=20, which keeps checkpoints of the whole run. The folder
gpt2 holds a Hugging Face model: `config.json`, `model.safetensors`, and its tokenizer files. Without a prompt, the page
shows a window of the run's validation text; if the run's text file has moved, name it with --text.
`python -m attnlab.see` is the same command.

The page also shows the scores and the effect of each head. Duplicate and induction heads are scored on 32 sequences of
random tokens that repeat with a random period; the other kinds are scored on up to 32 windows of the validation text,
or on the same sequences if there is none. The printed p-values compare a head with the untrained model. The effect is
the change in loss, on these windows or else on the prompts, when a head's output is replaced by its mean.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Int

from attnlab import commands, compilation, see
from attnlab.config import RunConfig
from attnlab.data import tasks
from attnlab.interop import huggingface
from attnlab.nn import GPT, custom
from attnlab.nn.mixers.interface import CausalMixer, RecurrentMixer
from attnlab.see.head_scores import KINDS as SCORES
from attnlab.see.pages.document import is_page
from attnlab.support.errors import UserError
from attnlab.support.extras import require
from attnlab.training.loading import checkpoints_of, chosen_step, load, peek
from attnlab.training.workdir import Workdir
from attnlab.types import Array

SEQUENCES = 32  # for scores and effects
LONGEST = 128  # tokens, unless --length is set
UNTRAINED_HEADS = 16  # per layer, at least; from as many initializations as needed
BY_TOKEN = ("duplicate", "induction")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return commands.run(_define, functools.partial(_main, own_process=argv is None), __doc__, argv)


def _define(values, argv):
    commands.define_import(values, argv)
    flags.DEFINE_string("workdir", None, "folder of the run, or of a Hugging Face model", flag_values=values)
    flags.DEFINE_multi_string("prompt", None, "a text to show", flag_values=values)
    flags.DEFINE_string("checkpoints", "latest", "latest, best, all, or steps separated by commas", flag_values=values)
    flags.DEFINE_string("out", None, "the page to write; default: see.html in the workdir", flag_values=values)
    longest = f"most tokens of a prompt; default: the model's context, up to {LONGEST}"
    flags.DEFINE_integer("length", None, longest, flag_values=values)
    meaning = "the file that the run was trained on, if it has moved"
    flags.DEFINE_string("text", None, meaning, flag_values=values)
    flags.DEFINE_bool("effects", True, "measure the loss without each head", flag_values=values)
    flags.DEFINE_integer("max_bytes", 4 << 20, "largest size of the page, in bytes", flag_values=values)


def _main(values, own_process: bool) -> int:
    if values.workdir is None:
        raise UserError("--workdir is missing: name the folder of a run, e.g. --workdir=runs/quickstart")
    require("matplotlib.pyplot", "plots", "the picture in a page")
    workdir = Path(values.workdir)
    out = _checked_out(values.out, workdir)
    if own_process:
        compilation.keep_programs()
    model, tokenizer, config = peek(workdir)
    if tokenizer is None:
        raise UserError(f"{workdir} has no tokenizer: put tokenizer.json there, or vocab.json and merges.txt")
    custom.check_used(values["import"].value, model.config.used)
    _tell_of_mixers(model)
    steps = _steps(values.checkpoints, workdir)
    subject = _subject(values, workdir, model, tokenizer, config)
    examine = _examiner(model, config.seed, subject, values.effects)
    findings = {}
    for number, step in enumerate(steps, 1):
        start = time.perf_counter()
        try:
            findings[step] = examine(load(workdir, "latest" if step is None else step).params)
        except ValueError as error:  # e.g. the checkpoint is damaged, or weights are not finite
            message = f"{_step(step)}: {commands.one_line(error)}"
            if values.checkpoints != "all":
                raise UserError(message) from error
            print(f"skipped {message}", file=sys.stderr)
            continue
        loss = f"loss {findings[step].effects.baseline:.4f} on {subject.measured_on}, " if values.effects else ""
        seconds = time.perf_counter() - start
        print(f"{_step(step)} ({number} of {len(steps)}): {loss}{seconds:.1f} s", flush=True)
    if not findings:
        raise UserError(f"--checkpoints=all: {workdir} has no intact checkpoint: repeat the command that trained it")
    steps = list(findings)
    page = _page(findings, subject.labels, out, f"{workdir.resolve().name}{_title(steps)}", values.max_bytes)
    print(_summary(steps[-1], findings[steps[-1]], subject.measured_on))
    print(f"\n{page.path}: {page.path.stat().st_size:,} bytes; open it in a browser")
    return 0


# ------------------------------------------------------------------------------------ the model, its checkpoints, texts


def _checked_out(name: str | None, workdir: Path) -> Path:
    """Return the path of a new page or of an earlier page to replace; raise UserError for any other file."""
    out = Path(name) if name is not None else (workdir if workdir.is_dir() else workdir.parent) / "see.html"
    if name == "" or out.is_dir() or (name and not out.parent.is_dir()):
        raise UserError(f"--out={name}: expected a file in a folder that exists, e.g. --out=see.html")
    if out.exists() and not is_page(out):
        raise UserError(f"{out} exists and is not an attnlab page: choose another --out, or remove it")
    return out


def _tell_of_mixers(model: GPT) -> None:
    """Print which layers have no pattern, or one without softmax; raise UserError if no layer has a pattern."""
    mixers = {layer.kind: layer.module for layer in model.config.used if issubclass(layer.module, CausalMixer)}
    read = [name for name, layer in mixers.items() if issubclass(layer, RecurrentMixer)]
    without = [name for name in mixers if name not in read]
    if {*without} == {layer.kind for layer in model.config.used}:
        raise UserError(f"layers of {', '.join(without)} have no pattern and no heads: there is nothing to see")
    if without:
        print(f"layers of {', '.join(without)} have no pattern: the page omits them")
    if read:
        print(f"the pattern of {', '.join(read)} is each token's share of what a state reads, by absolute values")


def _steps(checkpoints: str, workdir: Path) -> list[int | None]:
    """The steps that --checkpoints names, ascending; [None] for a model without a run."""
    if huggingface.is_hf(workdir):
        if checkpoints not in ("latest", "best"):
            raise UserError(f"{workdir} is a Hugging Face model, which has no checkpoints: remove --checkpoints")
        return [None]
    with contextlib.closing(checkpoints_of(workdir)) as saved:
        if checkpoints != "all":
            return sorted({chosen_step(saved, workdir, name.strip()) for name in checkpoints.split(",")})
        newest, steps = chosen_step(saved, workdir, "latest"), saved.steps()
    if len(steps) == 1:
        raise UserError(
            f"--checkpoints=all: {workdir} has only the checkpoint of step {newest}: train with "
            "--config.checkpoint.history=20 to keep more, or remove --checkpoints"
        )
    return steps


class Subject(NamedTuple):
    """The tokens that a model is examined on."""

    prompts: Int[Array, "P T"]  # padded with zeros on the right
    labels: list[list[str]]  # the tokens of each prompt as text
    scored: tuple[tuple[Sequence[str], Int[Array, "N T"]], ...]  # kinds of heads, and the tokens they are scored on
    predicted: Int[Array, "N T1"]  # tokens for the loss
    measured_on: str  # a description of `predicted`


def _subject(values, workdir: Path, model: GPT, tokenizer, config: RunConfig) -> Subject:
    length = _length(values.length, model.config.context)
    texts = values.prompt or []
    prompts = [_encoded(text, tokenizer, length, model.config.context) for text in texts]
    windows = None if huggingface.is_hf(workdir) else _windows(workdir, config, length, values.text, bool(prompts))
    if windows is None and not prompts:
        raise UserError(f'{workdir} is a Hugging Face model, which has no text: give --prompt="…"')
    prompts = prompts or [windows[0, :-1]]
    repeated = np.asarray(tasks.repeats(0, batch_size=SEQUENCES, length=length, vocab_size=tokenizer.vocab_size))
    if windows is None:
        shortest = min(map(len, prompts))
        predicted = np.stack([prompt[:shortest] for prompt in prompts])
        scored, measured_on = ((SCORES, repeated),), f"the first {shortest} tokens of each prompt"
    else:
        others = tuple(kind for kind in SCORES if kind not in BY_TOKEN)
        predicted, scored = windows, ((others, windows[:, :-1]), (BY_TOKEN, repeated))
        measured_on = f"{len(windows)} windows of validation text"
    padded = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in zip(padded, prompts):
        row[: len(prompt)] = prompt
    labels = [[_label(tokenizer, token) for token in prompt.tolist()] for prompt in prompts]
    return Subject(padded, labels, scored, predicted, measured_on)


def _length(length: int | None, context: int) -> int:
    if context < 2:
        raise UserError(f"the model's context is {context} token: expected a model that attends to 2 or more")
    if length is not None and not 2 <= length <= context:
        raise UserError(f"--length={length}: expected 2 or more, up to the model's context of {context}")
    return length or min(context, LONGEST)


def _encoded(text: str, tokenizer, length: int, context: int) -> np.ndarray:
    prompt = tokenizer.encode(text)
    if not 2 <= len(prompt) <= length:
        limit = f"--length={length}" if length < context else f"the model's context of {context}"
        count = f"{len(prompt)} token{'s' * (len(prompt) != 1)}"
        raise UserError(f"--prompt={text!r} has {count}: expected 2 or more, up to {limit}")
    return prompt


def _windows(
    workdir: Path, config: RunConfig, length: int, text: str | None, is_optional: bool
) -> Int[np.ndarray, "N T1"] | None:
    """Evenly spaced windows of the validation text, each within one document; None if none exist and `is_optional`."""
    from attnlab.training import text as texts

    several = 32 if config.data.packing == "documents" else 1
    size = several * SEQUENCES
    fields = {"model.context": length, "optimizer.accumulation": 1, "batch_size": size, "eval.windows": size}
    fields["data.store"] = ""  # the run may come from another machine
    try:
        elsewhere = config.data.path or config.data.mixture
        if text is None and elsewhere and not Path(config.data.path).is_file():
            raise UserError(f"{workdir} lacks its training text, {elsewhere}: name it with --text=FILE")
        if text is not None:
            fields |= {"data.path": text, "data.name": "text", "data.mixture": ""}
        batch = texts.load(config.changed(fields), Workdir(workdir)).validation[0]
    except UserError as error:
        if not is_optional:
            raise UserError(f'{commands.one_line(error)}; or give --prompt="…"') from error
        print(f"skipped the validation text ({commands.one_line(error)})", file=sys.stderr)
        return None
    usable = batch.weight > 0
    if batch.segments is not None:
        usable &= (batch.segments == batch.segments[:, :1]).all(axis=1)
    windows = batch.tokens[usable]
    if not len(windows) and not is_optional:
        raise UserError(f"no document of the validation text has {length + 1} tokens: lower --length, or give --prompt")
    return windows[:: max(1, len(windows) // SEQUENCES)][:SEQUENCES] if len(windows) else None


def _label(tokenizer, token: int) -> str:
    if tokenizer.kind == "byte":
        return bytes([token]).decode(errors="surrogateescape")  # the page shows incomplete characters as bytes
    return tokenizer.decode([token], continues=True)


# ----------------------------------------------------------------------------------------------- one checkpoint, a page


class Findings(NamedTuple):
    """Patterns, scores and effects of one checkpoint."""

    run: see.Run
    scores: list[see.Scores]  # for each entry of `Subject.scored`
    effects: see.Effects | None  # effect of ablating each head on the loss, in nats


def _shares(pattern):
    """Shares `[B, H, T, T]` of a recurrence, summed over a token's steps (delta_product has several)."""
    *batch, length, steps = pattern.shape
    return see.shares(pattern).reshape(*batch, length, length, steps // length).sum(axis=-1)


def _examiner(model: GPT, seed: int, subject: Subject, measures_effects: bool) -> Callable[[dict], Findings]:
    """Return a function that examines a checkpoint's variables; its programs are compiled once."""

    modules = [model.config.layer(number).module for number in range(model.config.num_layers)]
    recurrent = {f"block_{n}/attention" for n, module in enumerate(modules) if issubclass(module, CausalMixer)}

    @jax.jit
    def patterns(variables, tokens) -> see.Run:
        captured = see.capture(model, variables, tokens).values["pattern"]
        shown = {path: _shares(pattern) if path in recurrent else pattern for path, pattern in captured.items()}
        return see.Run(None, {"pattern": shown}, tuple(shown))

    def layers(variables, tokens) -> list[np.ndarray]:
        run = patterns(variables, tokens)
        return [np.asarray(run.values["pattern"][path]) for path in run.paths("pattern")]

    init, count = jax.jit(model.init), -(-UNTRAINED_HEADS // model.config.num_heads)
    untrained = [[] for _ in subject.scored]
    for number in range(count):
        variables = init(jax.random.key(seed + number), jnp.zeros((1, 1), jnp.int32))
        for (_, tokens), samples in zip(subject.scored, untrained):
            samples.append(layers(variables, tokens))
    untrained = [[np.concatenate(same, axis=1) for same in zip(*samples)] for samples in untrained]
    inputs, targets = subject.predicted[:, :-1], subject.predicted[:, 1:]

    def examine(variables) -> Findings:
        run = patterns(variables, subject.prompts)
        scores = [
            see.scores(layers(variables, tokens), tokens, kinds, untrained=others, paths=run.paths("pattern"))
            for (kinds, tokens), others in zip(subject.scored, untrained)
        ]
        effects = see.ablate(model, variables, inputs, jnp.mean, targets=targets) if measures_effects else None
        return Findings(run, scores, effects)

    return examine


def _page(findings: dict[int | None, Findings], labels, out: Path, title: str, max_bytes: int) -> see.Page:
    runs = {step: each.run for step, each in findings.items()}
    scores = {step: {kind: v for s in each.scores for kind, v in s.values.items()} for step, each in findings.items()}
    effects = {step: each.effects for step, each in findings.items()}
    if None in findings:
        runs, scores, effects = runs[None], scores[None], effects[None]
    elif None in effects.values():
        effects = None
    try:
        return see.page(runs, labels, out, title=title, scores=scores, effects=effects, max_bytes=max_bytes)
    except ValueError as error:
        raise UserError(f"{error} (--max_bytes, --checkpoints, --prompt, --length)") from error


def _title(steps: Sequence[int | None]) -> str:
    if steps[0] is None:
        return ""
    return f", {_step(steps[0])}" if len(steps) == 1 else f", steps {steps[0]:,} to {steps[-1]:,}"


def _step(step: int | None) -> str:
    return "the model" if step is None else f"step {step:,}"


def _summary(step: int | None, findings: Findings, measured_on: str) -> str:
    lines = [f"\nhighest-scoring heads of {_step(step)}:", *map(str, findings.scores)]
    if findings.effects is not None:
        change = findings.effects.change
        layer, head = np.unravel_index(np.argmax(change), change.shape)
        where = f"{findings.effects.paths[layer]} head {head}"
        lines.append(f"effect     {change[layer, head]:+.4f} nats at {where}, ablated, on {measured_on}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
