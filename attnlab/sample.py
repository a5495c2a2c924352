"""Generate text with a trained model, and score texts.

    attnlab sample --workdir=runs/quickstart --prompt="The "
    attnlab sample --workdir=gpt2 --prompt="The "
    attnlab sample --workdir=runs/quickstart --prompts=prompts.jsonl --out=texts.jsonl
    attnlab sample --workdir=runs/quickstart --score=text.txt

In the second line, gpt2 is the folder of a Hugging Face model: `config.json`, `model.safetensors`, and tokenizer files.
`python -m attnlab.sample` is the same command.

The text is printed while it is generated, and may have any length. If it outgrows the context, models with learned or
sinusoidal positions keep the last half of the context and prefill it again; with rotary, alibi or no positions the
cache rolls; the state of recurrent layers has a constant size and simply continues. If the prompt is longer than the
context, only its end is read. A text ends after max_tokens tokens, before a stop string, or at the model's end-of-text
token.

Several prompts are continued side by side, each as if it were alone. In a `.jsonl` file of prompts, each line is an
object with the field "prompt"; in any other file, each line is a prompt. --out writes a line of JSON for each text:
prompt, sample, text, tokens, logprobs (in nats, before temperature and the like) and stopped_by (max_tokens, stop or
end_of_text); the same command resumes after an interruption.
"""

if __name__ == "__main__":
    from attnlab.support import hugepages, status

    hugepages.restart("attnlab.sample")
    status.end_when_interrupted()

import functools
import sys
import time
from pathlib import Path

from absl import flags

from attnlab import commands, compilation
from attnlab.generation.decoding import decode, generate
from attnlab.generation.drawing import Draw
from attnlab.generation.prompt_files import Records, read_prompts
from attnlab.generation.scoring import score
from attnlab.generation.stop_strings import StopStrings, before_stop
from attnlab.generation.texts import Drawn, complete, prompt_ids, recorded
from attnlab.nn import custom
from attnlab.support import files
from attnlab.support.errors import UserError
from attnlab.support.progress import shown
from attnlab.training.loading import Run, load

__all__ = ["Draw", "generate", "main", "prompt_ids"]


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return commands.run(_define, functools.partial(_main, own_process=argv is None), __doc__, argv)


def _define(values, argv):
    commands.define_import(values, argv)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    integer = functools.partial(flags.DEFINE_integer, flag_values=values)
    number = functools.partial(flags.DEFINE_float, flag_values=values)
    text("workdir", None, "folder of the run, or of a Hugging Face model")
    text("prompt", None, "text to continue; by default a new line")
    text("prompts", None, "file of prompts, one per line, or .jsonl; - for standard input")
    text("out", None, "new .jsonl file for the texts, their tokens and log-probabilities")
    text("score", None, "text file to score instead: nats per token, bits per byte")
    integer("max_tokens", 500, "number of tokens to generate")
    integer("num_samples", 1, "number of texts to generate for each prompt")
    integer("batch_size", 8, "texts generated side by side, if there are several prompts; does not change the texts")
    number("temperature", 0.8, "divides the logits; 0 takes the most likely token")
    integer("top_k", 0, "sample from the k most likely tokens; 0 for all")
    number("top_p", 1.0, "sample from the most likely tokens that sum to p; 1 for all")
    number("min_p", 0.0, "sample from tokens with at least this share of the largest probability; 0 for all")
    number(
        "repetition_penalty", 1.0, "divides the logits of tokens in the text so far (negative: multiplies); 1 for none"
    )
    flags.DEFINE_multi_string("stop", [], r"string before which a text ends (\n: a new line)", flag_values=values)
    flags.DEFINE_bool("end_of_text", True, "end a text at the model's end-of-text token", flag_values=values)
    integer("seed", 0, "seed of the random draws: the same seed gives the same text")
    text("step", "latest", "checkpoint: latest, best, or a step")


def _check(values) -> None:
    for name, good, expected in (
        ("max_tokens", 1 <= values.max_tokens < 2**31, "1 or more, below 2^31"),
        ("num_samples", values.num_samples >= 1, "1 or more"),
        ("batch_size", values.batch_size >= 1, "1 or more"),
        ("temperature", 0 <= values.temperature <= 1e6, "a number, 0 or more (up to a million)"),
        ("top_k", values.top_k >= 0, "0 or more"),
        ("top_p", 0 < values.top_p <= 1, "a number above 0, up to 1"),
        ("min_p", 0 <= values.min_p <= 1, "a number from 0 to 1"),
        ("repetition_penalty", 0 < values.repetition_penalty <= 1e6, "a number above 0 (up to a million)"),
        ("seed", 0 <= values.seed < 2**32, "0 or more, below 2^32"),
    ):
        if not good:
            raise UserError(f"--{name}={values[name].value}: expected {expected}")
    for one, other in (("prompt", "prompts"), ("score", "prompt"), ("score", "prompts"), ("score", "out")):
        if values[one].value is not None and values[other].value is not None:
            raise UserError(f"--{one} cannot be combined with --{other}: remove one")
    if values.workdir is None:
        raise UserError("--workdir is missing: name the folder of a run, e.g. --workdir=runs/quickstart")


def _main(values, own_process: bool) -> int:
    _check(values)
    prompts = read_prompts(values.prompts) if values.prompts is not None else [values.prompt or ""]
    scored = None if values.score is None else _read(values.score)
    if own_process:
        compilation.keep_programs()
    run = load(Path(values.workdir), values.step)
    custom.check_used(values["import"].value, run.model.config.used)
    if run.tokenizer is None:
        raise UserError(f"{values.workdir} holds no tokenizer: put tokenizer.json there, or vocab.json and merges.txt")
    if scored is not None:
        return _score(run, scored)
    options = _options(values, run)
    start = time.perf_counter()
    if values.out is not None:
        count = _write(values, run, prompts, options)
    else:
        count = _stream(run, prompts[0], options) if len(prompts) == 1 else _print(values, run, prompts, options)
    if sys.stderr.isatty():
        print(f"{count / (time.perf_counter() - start):.0f} tokens per second", file=sys.stderr)
    return 0


def _options(values, run: Run) -> dict:
    """Arguments of `complete`, except the batch size."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    draw = Draw(**{name: values[name].value for name in names}, vocab_size=run.tokenizer.vocab_size)
    stop = [string.replace(r"\n", "\n").replace(r"\t", "\t") for string in values.stop]
    # Check the stop strings before anything is written.
    StopStrings(stop, run.tokenizer)
    end = run.tokenizer.end_of_text if values.end_of_text else ()
    options = {"max_tokens": values.max_tokens, "draw": draw, "stop": stop, "end": end}
    return options | {"num_samples": values.num_samples, "seed": values.seed}


def _print_text(text: str, end: str = "\n") -> None:
    """Print a model's text; on a terminal, control characters are shown instead of executed."""
    print(shown(text), end=end, flush=True)


def _stream(run: Run, prompt: str, options: dict) -> int:
    """Print the first text while it is generated, then the others; returns the number of tokens."""
    stop, end = options["stop"], options["end"]
    stops = StopStrings(stop, run.tokenizer).after if stop else None
    steps = decode(run.model, run.params, [prompt_ids(run.tokenizer, prompt)], **options | {"stop": stops})
    drawn = [Drawn() for _ in range(options["num_samples"])]
    steps = recorded(steps, drawn)
    write = functools.partial(_print_text, end="")
    write(prompt)
    first = (token for step in steps if (token := int(step.tokens[0])) >= 0 and token not in end)
    for piece in before_stop(run.tokenizer.stream(first, continues=True), stop):
        write(piece)
    print()
    for _ in steps:
        pass
    for text in drawn[1:]:
        print("-" * 80)
        _print_text(prompt + text.completion(run.tokenizer, prompt, 0, stop, end).text)
    return sum(len(text.tokens) for text in drawn)


def _print(values, run: Run, prompts: list[str], options: dict) -> int:
    """Print the texts of several prompts, each when its batch is done; returns the number of tokens."""
    count = 0
    for done in complete(run, prompts, batch_size=values.batch_size, **options):
        _print_text(("-" * 80 + "\n") * (count > 0) + done.prompt + done.text)
        count += len(done.tokens)
    return count


def _write(values, run: Run, prompts: list[str], options: dict) -> int:
    """Write the texts to a JSONL file; returns the number of tokens."""
    from attnlab.training.checkpoints import sha256  # takes seconds to import

    samples, count = values.num_samples, 0
    settings = {"model": repr(run.model), "params": sha256(run.params), "prompts": prompts}
    settings |= options | {"draw": options["draw"]._asdict()}
    with Records(values.out, settings, group=samples) as records:
        if records.count:
            print(f"{values.out}: resuming after {records.count} of {len(prompts) * samples} texts", file=sys.stderr)
        for done in complete(run, prompts[records.count // samples :], batch_size=values.batch_size, **options):
            records.write(done._asdict())
            count += len(done.tokens)
    return count


def _read(path: str) -> str:
    try:
        text = files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"--score={path} cannot be read: {reason}") from error
    if len(text) < 2:
        raise UserError(f"--score={path} holds {len(text)} characters: give a text with two or more")
    return text


def _score(run: Run, text: str) -> int:
    """Print how well the model predicts a text."""
    (result,) = score(run, [text], batch_size=max(8, 8192 // run.model.config.context))
    if not result.tokens:
        raise UserError("--score: the text is a single token, and the first token is not scored: give a longer text")
    print(
        f"{result.nats_per_token:.4f} nats per token, {result.bits_per_byte:.4f} bits per byte "
        f"({result.tokens:,} tokens scored, {len(text.encode()):,} bytes)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
