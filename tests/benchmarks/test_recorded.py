"""The recorded figures of docs/benchmarks.md."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
RECORD = {
    "machine": {
        "vendor": "AuthenticAMD",
        "family": "25",
        "model": "17",
        "name": "AMD EPYC",
        "cores": 2,
        "instruction_sets": ["avx512f"],
    },
    "benchmarks": {
        "loss": {"a.txt": {"figures": {"loss_x": 1.8, "seconds_x": 20.0}}},
        "attention": {
            label: {"figures": {"seconds": {"attnlab": 0.1, "torch SDPA": 0.1 * r}, "ratio": {"torch SDPA": r}}}
            for label, r in {"causal": 2.0, "window": 0.5}.items()
        },
        "products": {"small": {"figures": {"gflop_small": 3.0, "floor_ms_small": 10.0, "floor_torch_ms_small": 9.0}}},
    },
}
for cases in RECORD["benchmarks"].values():
    for case in cases.values():
        case |= {"date": "2026-11-26", "versions": {"jax": "0.10.2", "torch": "2.13.0"}, "idle": False}


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "docs")
    import recorded

    return recorded


def test_page_shows_the_records_beside_it(recorded):
    text = recorded.PAGE.read_text(encoding="utf-8")
    assert recorded.START in text and recorded.END in text
    assert recorded.page(text, recorded.records(recorded.FOLDER)) == text, "run `python docs/recorded.py`"


def test_page_without_records_says_so(recorded):
    empty = recorded.page(f"Before\n{recorded.START}old\n{recorded.END}After\n", {})
    assert empty == f"Before\n{recorded.START}\nNothing is recorded yet.\n\n{recorded.END}After\n"


def test_page_names_the_worst_and_the_best_of_each_table(recorded):
    text = recorded.page(f"{recorded.START}{recorded.END}", {"amd.json": RECORD})
    assert "### AMD EPYC, family 25, model 17, 2 cores\n" in text and "[All figures](benchmarks/amd.json)" in text
    assert "Worst: 0.50 (window). Best: 2.00 (causal)." in text
    assert "| causal | 100.00 | 200.00 | **2.00** | 2026-11-26, JAX 0.10.2, PyTorch 2.13.0, machine not idle |" in text
    assert "| `x` | 1.8000 | 20.0 | – | – |" in text
    assert "| small | 3.0 | 10.00 | 9.00 | **0.90** |" in text
    assert recorded.page(text, {"amd.json": RECORD}) == text
