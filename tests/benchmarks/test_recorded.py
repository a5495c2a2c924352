"""The recorded figures of docs/benchmarks.md."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CASE = {"date": "2026-11-26", "versions": {"jax": "0.10.2", "torch": "2.13.0"}, "idle": True}
MACHINE = {"vendor": "AuthenticAMD", "family": "25", "model": "17", "name": "AMD EPYC", "cores": 2}
RECORD = {
    "machine": MACHINE | {"instruction_sets": ["avx512f"]},
    "benchmarks": {
        "train": {
            "small": CASE
            | {
                "figures": {
                    "ratio_small_float32": 0.8,
                    "ratio_small_bfloat16": 1.5,
                    "ratio_small_bfloat16_over_autocast": 1.25,
                    **{
                        f"tokens_per_second_small_attnlab_{p}": n for p, n in {"float32": 800, "bfloat16": 1500}.items()
                    },
                    **{f"step_over_floor_small_attnlab_{p}": 1.5 for p in ("float32", "bfloat16")},
                    "tokens_per_second_small_nanoGPT": 900,
                    "tokens_per_second_small_nanoGPT_compiled": 1000,
                    "tokens_per_second_small_nanoGPT_autocast": 1200,
                }
            }
        },
        "loss": {
            "a.txt": CASE
            | {"figures": {"loss_nanoGPT": 1.9, "seconds_nanoGPT": 80.0, "loss_x": 1.8, "seconds_x": 20.0}}
        },
        "attention": {
            label: CASE
            | {
                "idle": False,
                "figures": {"seconds": {"attnlab": 0.1, "torch SDPA": 0.1 * r}, "ratio": {"torch SDPA": r}},
            }
            for label, r in {"causal": 2.0, "window": 0.5}.items()
        },
        "products": {
            "small, float32": CASE
            | {
                "figures": {
                    "gflop_small_float32": 3.0,
                    "floor_ms_small_float32": 10.0,
                    "floor_torch_ms_small_float32": 9.0,
                }
            }
        },
    },
}


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
    assert "Worst: 0.80 (small, float32). Best: 1.25 (small, bfloat16)." in text
    assert "| small | float32 | 800 | 1,000 | **0.80** | 0.80 | 1.50 | 2026-11-26, JAX 0.10.2, PyTorch 2.13.0 |" in text
    assert "| small | bfloat16 | 1,500 | 1,200 | **1.25** | 1.50 | 1.50 |" in text
    assert "Worst: 0.50 (window). Best: 2.00 (causal)." in text and "machine not idle" in text
    assert "| `x` | 1.8000 | 20.0 | – | – |" in text
    assert "| small, float32 | 3.0 | 10.00 | 9.00 | **0.90** |" in text
    assert recorded.page(text, {"amd.json": RECORD}) == text
