"""Draw the figures of the README and of the study pages from new runs.

python docs/figures.py              # all of them: hours on two CPU cores, because most studies run in full
python docs/figures.py race resume see compare
python docs/figures.py scaling norms
python docs/figures.py runs/all     # studies that have run, in the folder of `attnlab study all`

A study runs as it did for its current figure: in full, or with --fast. A figure is replaced only if its run succeeds.
The model of `see` stays in build/figures. The race runs against the peers that are installed: `make peers` installs
most, `pip install tokamax attnax` the rest. `see` needs Chromium and playwright.
"""

import functools
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["MPLBACKEND"] = "agg"

import jax
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from attnlab import comparing, plots
from attnlab.nn import GPT
from attnlab.study.registry import STUDIES
from attnlab.study.running import RESULT, read_result
from attnlab.training.metrics import read

IMAGES = Path(__file__).parent / "images"
COLORS = 96  # in a palette: enough for a heat map, and a third of the bytes


def main(names: list[str]) -> int:
    """Draws the named figures; all of them without names."""
    known = {"race": race, "resume": resume, "see": see, "compare": compare}
    known["mixers"] = mixers
    known |= {name: lambda folder, name=name: study(name, folder) for name in STUDIES}
    known |= {name: lambda _, ran=Path(name): keep_all(ran) for name in names if Path(name).is_dir()}
    if unknown := [name for name in names if name not in known]:
        print(f"error: {unknown[0]!r} is neither a figure nor a folder: use {', '.join(known)}", file=sys.stderr)
        return 2
    for name in names or known:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            known[name](Path(folder))
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return 0


def spread(weights, count: int = 4) -> list[int]:
    """The heads that differ most from one another, the most concentrated first."""
    flat = weights.reshape(len(weights), -1)
    chosen = [int(np.square(flat).sum(1).argmax())]
    while len(chosen) < count:
        distance = np.abs(flat[:, None] - flat[chosen]).sum(-1).min(1)
        chosen.append(int(distance.argmax()))
    return sorted(chosen)


def race(folder: Path) -> None:
    """Runs the operator's race at one length, and draws the times of forward + backward."""
    length, path = 4096, folder / "race.json"
    run("attnlab.bench", "attention", f"--lengths={length}", "--masks=causal,window", f"--json={path}")
    seconds = json.loads(path.read_text())["seconds"]
    masks = {"causal": "causal", "window": "window of 256"}
    with plt.rc_context(plots.STYLE):
        figure, grid = plt.subplots(1, len(masks), figsize=(6.5, 3))
        for axes, (mask, label) in zip(grid, masks.items()):
            times = seconds[f"{mask}, T = {length:,}, forward + backward"]
            times = {name: 1e3 * value for name, value in times.items() if name != "attnlab dense"}
            names = sorted(times, key=times.get, reverse=True)
            colors = [plots.COLORS[0] if name == "attnlab" else plots.COLORS[7] for name in names]
            bars = axes.barh(names, [times[name] for name in names], color=colors)
            axes.bar_label(bars, fmt="%.0f", padding=3)
            axes.set(title=label, xlabel="milliseconds", xlim=(0, 1.15 * max(times.values())))
        figure.suptitle(f"Forward + backward, {length:,} tokens, 8 heads of 64, float32\n{processor()}", fontsize=9)
    save(figure, IMAGES / "race.png")


def resume(folder: Path) -> None:
    """Trains a run undisturbed, and again with three SIGKILLs, and draws the losses of both."""
    options = ["--config=configs/quickstart.py", "--config.steps=600", "--config.log.every=5"]
    options += ["--config.checkpoint.every=50", "--config.eval.every=600", "--config.sample.length=1"]
    run("attnlab.train", *options, f"--workdir={folder / 'undisturbed'}")
    lives = [life(options, folder / "killed", until) for until in (130, 290, 470, None)]
    expected, ended = read(folder / "undisturbed" / "metrics.jsonl"), read(folder / "killed" / "metrics.jsonl")
    same = expected[-1]["params_sha256"] == ended[-1]["params_sha256"]
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(figsize=(6.5, 3))
        axes.plot(*losses(expected), color="#d8d3c8", linewidth=7, label="never interrupted")
        for number, records in enumerate(lives):
            steps, values = losses(records)
            label = "killed three times by SIGKILL, and resumed" if number == 0 else None
            axes.plot(steps, values, color=plots.COLORS[0], linewidth=1.4, label=label)
            if number < len(lives) - 1:
                axes.plot(steps[-1], values[-1], "X", color=plots.COLORS[1], markersize=10, zorder=3)
                axes.annotate("kill -9", (steps[-1], values[-1]), (0, 16), textcoords="offset points", ha="center")
        axes.set(xlabel="step", ylabel="training loss (nats per character)")
        axes.legend(frameon=False)
        ending = "identical, bit for bit" if same else "NOT identical"
        figure.suptitle(f"Killed three times and resumed: the final parameters are {ending}")
    save(figure, IMAGES / "resume.png")
    if not same:
        raise SystemExit("error: a resumed run differs from an undisturbed one")


def life(options: list[str], workdir: Path, until: int | None) -> list[dict]:
    """Starts or resumes a run and kills it as soon as it has logged step `until`; returns its metrics."""
    path = workdir / "metrics.jsonl"
    child = subprocess.Popen(command("attnlab.train", *options, f"--workdir={workdir}"), stdout=subprocess.DEVNULL)
    while child.poll() is None:
        if until is not None and any(record["step"] >= until for record in read(path)):
            child.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    if child.wait() not in (0, -signal.SIGKILL):
        raise SystemExit(f"error: the run ended with {child.returncode}")
    return read(path)


def losses(records: list[dict]) -> tuple[list[int], list[float]]:
    """Steps and losses of the train records."""
    records = [record for record in records if record["split"] == "train"]
    return [record["step"] for record in records], [record["loss"] for record in records]


def see(folder: Path) -> None:
    """Trains the quickstart's model with a history, and photographs its page of attention in light and dark."""
    from playwright.sync_api import sync_playwright

    workdir = IMAGES.parents[1] / "build" / "figures" / "see" / "quickstart"  # the page's title names its last folder
    run("attnlab.train", "--config=configs/quickstart.py", "--config.checkpoint.history=20", f"--workdir={workdir}")
    prompt = "the class statement defines a class; the def statement defines"
    run("attnlab.see", f"--workdir={workdir}", "--checkpoints=all", f"--prompt={prompt}", f"--out={folder}/see.html")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for scheme in ("light", "dark"):
            tab = browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme=scheme)
            tab.goto(f"file://{folder}/see.html#layer=3&head=2&query=33")
            tab.wait_for_selector("#app:not([hidden])")
            shot = Image.open(io.BytesIO(tab.screenshot(full_page=True)))
            shrink(shot, IMAGES / f"see_{scheme}.png", width=1280, colors=200)
        browser.close()


def compare(folder: Path) -> None:
    """Compares positions on the Python language reference, as in docs/guide/comparing.md."""
    workdir = IMAGES.parents[1] / "build" / "figures" / "compare" / "positions"
    run("attnlab.compare", "--config=configs/compare_positions.py", f"--workdir={workdir}")
    rows = sorted(comparing.read(workdir), key=lambda row: -row["loss"])
    figure, axes = plt.subplots(figsize=(6.4, 1.4 + 0.36 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        axes.errorbar(row["loss"], place, xerr=row["loss_interval"], capsize=4, fmt="D", color=plots.COLORS[place])
    axes.set_yticks(range(len(rows)), [f"{row['variant']}\n{row['verdict'] or ''}".strip() for row in rows])
    axes.set_xlabel("loss on held-out text (nats per token), 95 % interval over seeds")
    save(figure, IMAGES / "compare.png")


def mixers(_: Path) -> None:
    """Draws the bytes of the decoding state against the length, for the quickstart's model with each mixer."""
    lengths = 2 ** np.arange(4, 17)
    models = {name: name for name in ("attention", "mamba2", "retention", "gated_delta", "gla", "gru")}
    models["3 gated_delta : 1 attention"] = "gated_delta*3 attention"
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, layers), color in zip(models.items(), plots.COLORS):
        model = GPT.of(layers=layers, vocab_size=96, positions="none")
        sizes = []
        for length in lengths:
            caches = jax.eval_shape(functools.partial(model.init_caches, 1, int(length)))
            sizes.append(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches)))
        axes.loglog(lengths, sizes, label=name, color=color)
    axes.set_xlabel("length of the text (tokens)")
    axes.set_ylabel("memory kept for decoding (bytes, float32)")
    axes.legend(frameon=False, fontsize=8)
    save(figure, IMAGES / "mixers.png")


def study(name: str, folder: Path) -> None:
    """Runs a study, and stores its figure and its result."""
    before = read_result(IMAGES / "studies" / f"{name}.json")
    run("attnlab.study", name, *(["--fast"] if before is None or before.fast else []), f"--out={folder / name}")
    keep(name, folder / name)


def keep_all(folder: Path) -> None:
    """Stores the figures and the results of `attnlab study all --out=FOLDER`."""
    for name in STUDIES:
        if (folder / name / RESULT).exists():
            keep(name, folder / name)


def keep(name: str, folder: Path) -> None:
    """Stores the figure and the result of a study."""
    shrink(Image.open(folder / f"{name}.png"), IMAGES / "studies" / f"{name}.png")
    shutil.copyfile(folder / RESULT, IMAGES / "studies" / f"{name}.json")


def save(figure, path: Path) -> None:
    """Draws a figure into a small PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    shrink(Image.open(buffer), path)


def shrink(image: Image.Image, path: Path, width: int = 1200, colors: int = COLORS) -> None:
    """Writes a picture with a palette, at most `width` pixels wide."""
    image = image.convert("RGB")
    if image.width > width:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(colors, dither=Image.Dither.NONE).save(path, optimize=True)


def command(module: str, *options: str) -> list[str]:
    """The command line of one of attnlab's modules."""
    return [sys.executable, "-m", module, *options]


def run(module: str, *options: str) -> None:
    """Runs one of attnlab's commands, with its output on this terminal."""
    subprocess.run(command(module, *options), check=True, cwd=IMAGES.parents[1])


def processor() -> str:
    """The CPU's name and its number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    cpuinfo = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
    cpuinfo = {name: value.strip() for name, value in cpuinfo.items()}
    name = cpuinfo["model name"].replace("(R)", "").removesuffix(" Processor")
    if "cpu family" in cpuinfo:
        name += f" (family {cpuinfo['cpu family']}, model {cpuinfo['model']})"
    return f"{os.cpu_count()} cores of {name}, JAX {jax.__version__}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
