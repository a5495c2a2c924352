"""Benchmark sampling speed against nanoGPT's own `generate`, called as its `sample.py` calls it.

    python -m attnlab.bench decode --peer_path=nanoGPT --peer_python=torch/bin/python [--num_samples=8]

Sizes as in `bench train`, with learned positions; temperature 0.8, top_k 200, from a prompt of one token. The two
alternate, each in a process of its own. Without --peer_path attnlab runs alone.

Figures: ratio_decode_SIZE, attnlab's tokens a second over nanoGPT's; tokens_per_second_SIZE_CONTENDER;
first_token_ms_SIZE, attnlab's, compilation excluded.
"""

import statistics

from attnlab.support import timing

from .harness import options, workers

COUNTS = {
    "tokens": (500, "tokens sampled for each text"),
    "num_samples": (1, "texts sampled in parallel"),
    "rounds": (7, "timed calls of each contender"),
}


def define(values, argv) -> None:
    """Define the flags."""
    options.define_peer(values)
    options.define_common(values, workers.SIZES, COUNTS)


def main(values) -> int:
    """Benchmark, and print the table."""
    options.check_common(values, workers.SIZES, COUNTS)
    options.check_peer(values)
    contenders = {"attnlab": {"peer": False}}
    if values.peer_path:
        contenders["nanoGPT"] = {"peer": True, "compiled": False}  # nanoGPT samples from the uncompiled model
    request = {"tokens": values.tokens, "samples": values.num_samples}
    cases, rows, texts = {}, {}, f"{values.num_samples} × {values.tokens} tokens"
    for size in values.sizes:
        peer, figures = (values.peer_path, values.peer_python), cases.setdefault(f"{size}, {texts}", {})
        with workers.started(contenders, size, workers.SIZES[size], *peer) as running:
            for worker in running.values():
                worker.ask("decode", **request)  # compiles
            answers = workers.alternate(running, "decode", values.rounds, size, **request)
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
    timing.table(f"sampling, {texts}", rows, caption="medians; × nanoGPT: tokens/s over nanoGPT's, median over rounds")
    options.keep_cases(values, "decode", cases)
    return 0
