"""Sampling: tokens a second against nanoGPT's own `generate`, as its `sample.py` calls it, in turns.

python -m attnlab.bench decode --peer_path=nanoGPT --peer_python=torch/bin/python [--num_samples=8] [--json=decode.json]

Sizes as in `attnlab.bench train`, learned positions, temperature 0.8, top_k 200, from one token on. Figures:
ratio_decode_SIZE, our tokens a second over its; tokens_per_second_SIZE_CONTENDER; first_token_ms_SIZE, ours, compiled.
"""

import statistics

from absl import flags

from attnlab.bench import options, timing, workers


def define(values, argv) -> None:
    """The flags."""
    options.define_peer(values)
    flags.DEFINE_list("sizes", list(workers.SIZES), "of " + ", ".join(workers.SIZES), flag_values=values)
    flags.DEFINE_integer("tokens", 500, "drawn for each text", flag_values=values)
    flags.DEFINE_integer("num_samples", 1, "texts drawn side by side", flag_values=values)
    flags.DEFINE_integer("rounds", 7, "counted calls of each contender", flag_values=values)
    options.define_json(values)


def main(values) -> int:
    """Races and prints the table."""
    options.check_positive(values, "tokens", "num_samples", "rounds")
    options.check_known("sizes", values.sizes, workers.SIZES)
    options.check_new(values, "json")
    options.check_peer(values)
    contenders = {"attnlab": {"peer": False}}
    if values.peer_path:
        contenders["nanoGPT"] = {"peer": True, "compiled": False}  # it samples from the model that is not compiled
    request = {"tokens": values.tokens, "samples": values.num_samples}
    figures, rows = {}, {}
    for size in values.sizes:
        with workers.started(contenders, workers.SIZES[size], values.peer_path, values.peer_python) as racing:
            workers.alternate(racing, "decode", 1, **request)  # compiles
            answers = workers.alternate(racing, "decode", values.rounds, **request)
        seconds = {name: [answer["seconds"] for answer in given] for name, given in answers.items()}
        print(timing.line(size, seconds), flush=True)
        first = 1e3 * statistics.median(answer["first"] for answer in answers["attnlab"])
        figures[f"first_token_ms_{size}"] = first
        if values.peer_path:
            figures[f"ratio_decode_{size}"] = timing.ratio(seconds, "nanoGPT", "attnlab")
        for name, times in seconds.items():
            rate = values.tokens * values.num_samples / statistics.median(times)
            figures[f"tokens_per_second_{size}_{name}"] = rate
            rows[f"{size}, {name}"] = row = {"tokens/s": f"{rate:,.0f}"}
            if values.peer_path:
                row["× nanoGPT"] = f"{timing.ratio(seconds, 'nanoGPT', name):.2f}"
        rows[f"{size}, attnlab"]["first token, ms"] = f"{first:.2f}"
    title = f"sampling, {values.num_samples} × {values.tokens} tokens"
    timing.table(title, rows, caption="medians; × nanoGPT: over its tokens/s, round by round")
    options.keep(values.json, figures)
    return 0
