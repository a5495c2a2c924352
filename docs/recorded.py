"""The recorded figures of docs/benchmarks.md: `python docs/recorded.py` writes them from docs/benchmarks/*.json.

They stand in the page itself, between two markers, so that GitHub shows them too; a test compares page and files.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
FOLDER = ROOT / "docs" / "benchmarks"
START, END = "<!-- recorded: written by docs/recorded.py -->\n", "<!-- end of recorded -->\n"
NAMES = {"jax": "JAX", "torch": "PyTorch"}


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), records(FOLDER)), encoding="utf-8")
    return 0


def records(folder: Path) -> dict[str, dict]:
    """The content of all records by file name."""
    return {file.name: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}


def page(text: str, by_name: dict[str, dict]) -> str:
    """A page with the tables of some records between its markers."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    tables = "\n".join(section(name, record) for name, record in by_name.items()) or "Nothing is recorded yet.\n"
    return f"{before}{START}\n{tables}\n{END}{after}"


def section(name: str, record: dict) -> str:
    """The tables of one machine."""
    machine, benchmarks = record["machine"], record["benchmarks"]
    title = [machine.get("gpu") or machine["name"] or machine["vendor"]]
    if "gpu" not in machine:
        title += [f"{key} {machine[key]}" for key in ("family", "model") if machine[key]]
    parts = [
        f"### {', '.join(title)}, {machine['cores']} cores",
        f"Instruction sets: {', '.join(machine['instruction_sets']) or 'unknown'}. [All figures](benchmarks/{name})",
    ]
    for benchmark, table in (
        ("train", training),
        ("loss", loss),
        ("attention", attention),
        ("products", products),
        ("start", start),
        ("gpu", gpu),
    ):
        if benchmark in benchmarks:
            parts += table(benchmarks[benchmark])
    return "\n\n".join(parts) + "\n"


def gpu(cases: dict[str, dict]) -> list[str]:
    """How many checks of the operator's backends passed."""
    case = cases["checks"]
    verdicts = {key.split("_")[1]: [] for key in case["figures"] if key.startswith("check_")}
    for key, verdict in case["figures"].items():
        if key.startswith("check_") and not verdict.startswith("not available"):
            verdicts[key.split("_")[1]].append(verdict == "ok")
    counts = ", ".join(f"`{name}` {sum(passed)} of {len(passed)}" for name, passed in verdicts.items())
    return [f"Checks against the specification that passed, {case['date']}, JAX {case['versions']['jax']}: {counts}."]


def training(cases: dict[str, dict]) -> list[str]:
    """Every size and precision against the faster nanoGPT of the same precision."""
    rows, ratios = [], {}
    for size, case in cases.items():
        figures = case["figures"]
        for precision, peer, suffix in (("float32", "", ""), ("bfloat16", "_autocast", "_over_autocast")):
            ours, ratio = f"{size}_attnlab_{precision}", figures.get(f"ratio_{size}_{precision}{suffix}")
            if ratio is None:
                continue
            theirs = [figures.get(f"tokens_per_second_{size}_nanoGPT{peer}{mode}", 0) for mode in ("", "_compiled")]
            ratios[f"{size}, {precision}"] = ratio
            over = [figures[f"ratio_{size}_{precision}"], figures[f"step_over_floor_{ours}"]]
            speeds = [f"{each:,.0f}" for each in (figures[f"tokens_per_second_{ours}"], max(theirs))]
            rows.append(
                [size, precision, *speeds, f"**{ratio:.2f}**", *(f"{each:.2f}" for each in over), measured(case)]
            )
    header = ["size", "precision", "attnlab, tokens/s", "nanoGPT, tokens/s", "ratio", "over nanoGPT's float32"]
    title = (
        "**Training**: attnlab's tokens/s divided by those of the faster nanoGPT at the same precision (bfloat16: "
        "under autocast, which nanoGPT's loop uses only on GPUs)."
    )
    return titled(f"{title} {extremes(ratios)}", [*header, "step over floor", "measured"], rows)


def loss(cases: dict[str, dict]) -> list[str]:
    """Every contender of a race to nanoGPT's loss."""
    parts = []
    for label, case in cases.items():
        figures, rows = case["figures"], []
        for name in (key.removeprefix("loss_") for key in figures if key.startswith("loss_")):
            ratios = [figures.get(f"ratio_{name}{suffix}") for suffix in ("", "_over_autocast")]
            cells = [f"{figures[f'loss_{name}']:.4f}", f"{figures[f'seconds_{name}']:.1f}"]
            rows.append([f"`{name}`", *cells, *(f"{each:.2f}" if each else "–" for each in ratios)])
        title = f"**Training to a loss**: {label} ({measured(case)}). A recipe above nanoGPT's loss has no ratio."
        header = ["", "loss, nats", "seconds", "float32 nanoGPT's seconds divided by these", "autocast nanoGPT's"]
        parts += [title, markdown(header, rows)]
    return parts


def attention(cases: dict[str, dict]) -> list[str]:
    """Every mask, length, pass and type against torch's SDPA."""
    rows, ratios = [], {}
    shapes = {label.partition(", B = ")[2] for label in cases}
    for label, case in cases.items():
        seconds, ratio = case["figures"]["seconds"], case["figures"]["ratio"].get("torch SDPA")
        if ratio is not None:
            label = label.partition(", B = ")[0] if len(shapes) == 1 else label
            ratios[label] = ratio
            times = [f"{1e3 * seconds[name]:.2f}" for name in ("attnlab", "torch SDPA")]
            rows.append([label, *times, f"**{ratio:.2f}**", measured(case)])
    shape = f", B = {shapes.pop()}" if len(shapes) == 1 else ""
    title = (
        f"**Attention**: the time of PyTorch's SDPA divided by attnlab's{shape}. {extremes(ratios)} SDPA takes windows "
        "and documents as a dense mask and computes every pair, which is where most of its time goes."
    )
    return titled(title, ["", "attnlab, ms", "SDPA, ms", "ratio", "measured"], rows)


def products(cases: dict[str, dict]) -> list[str]:
    """The matrix products of every training step through XLA, against PyTorch."""
    rows, ratios = [], {}
    for label, case in cases.items():
        figures, name = case["figures"], label.replace(", ", "_")
        xla, torch = figures[f"floor_ms_{name}"], figures.get(f"floor_torch_ms_{name}")
        if torch is not None:
            ratios[label] = torch / xla
            cells = [f"{figures[f'gflop_{name}']:.1f}", f"{xla:.2f}", f"{torch:.2f}", f"**{torch / xla:.2f}**"]
            rows.append([label, *cells, measured(case)])
    title = f"**Matrix products of a training step**: PyTorch's time divided by XLA's. {extremes(ratios, 'XLA')}"
    return titled(title, ["", "GFLOP", "XLA, ms", "PyTorch, ms", "ratio", "measured"], rows)


def start(cases: dict[str, dict]) -> list[str]:
    """Every command until its first result, with an empty compilation cache and with a filled one."""
    rows = []
    for label, case in cases.items():
        for name, result in (("start", "first step"), ("first_character", "first character")):
            seconds = [f"{case['figures'][f'{name}_{kind}_s']:.1f}" for kind in ("cold", "warm")]
            rows.append([f"{result}, `{label}`", case["figures"]["device"], *seconds, measured(case)])
    title = "**Start-up**: seconds from the command to its first result, by device."
    return titled(title, ["", "device", "empty compilation cache", "filled", "measured"], rows)


def extremes(ratios: dict[str, float], ours: str = "attnlab") -> str:
    """The worst and the best ratio in words; above 1 `ours` is faster."""
    if not ratios:
        return "No peer was installed."
    worst, best = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
    return f"Worst: {ratios[worst]:.2f} ({worst}). Best: {ratios[best]:.2f} ({best}). Above 1 {ours} is faster."


def measured(case: dict) -> str:
    """When and with what a case was measured."""
    versions = [f"{NAMES.get(name, name)} {version}" for name, version in case["versions"].items()]
    idle = {True: [], False: ["machine not idle"], None: ["idleness unknown"]}[case["idle"]]
    return ", ".join([case["date"], *versions, *idle])


def titled(title: str, header: list[str], rows: list[list[str]]) -> list[str]:
    """A title and a table; if the last column, "measured", is the same in all rows, the title has it instead."""
    if len({row[-1] for row in rows}) == 1:
        return [f"{title} Measured {rows[0][-1]}.", markdown(header[:-1], [row[:-1] for row in rows])]
    return [title, markdown(header, rows)]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table of cells."""
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())
