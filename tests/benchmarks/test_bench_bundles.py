"""The benchmark of bundles without a compiler: kinds of tiles, errors, and its tables."""

import re

import pytest

import attnlab
from attnlab._benchmarks import bundles as bench
from attnlab.planning import topologies
from attnlab.planning.bundles import Body, Kernel

CAPACITY = dict.fromkeys(
    ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU"), 4
)


def body(bundles=1000, matmuls=256, compares=0, loops=1):
    return Body(7, bundles, dict.fromkeys(CAPACITY, 12), matmuls, compares, loops)


def kernels(name, *bodies):
    names = {"splash": ("splash_mha_fwd_residuals.1", "splash_mha_dkv_no_residuals.1", "splash_mha_dq_no_residuals.1")}
    names["attnlab"] = ("attnlab_forward.1", "attnlab_dq.2", "attnlab_dkv.3")
    return [Kernel(kernel, 2000, CAPACITY, list(bodies)) for kernel in names[name]]


@pytest.mark.parametrize(
    "contender, case, bodies, kinds",
    [
        ("splash", "causal", [body(compares=256)], ["all"]),
        ("attnlab", "full", [body()], ["FULL"]),
        ("attnlab", "window", [body(compares=512)], ["PARTIAL"]),
        ("attnlab", "causal", [body(1100, compares=256), body()], ["FULL", "PARTIAL"]),
        ("attnlab", "alibi", [body(compares=9), body(compares=256)], ["FULL", "PARTIAL"]),
    ],
)
def test_bodies_are_told_apart_by_their_comparisons(contender, case, bodies, kinds):
    rows = bench.rows_of(bench.Call(64, case, contender), kernels(contender, *bodies))
    assert [(row.kernel, row.kind) for row in rows] == [(k, kind) for k in ("forward", "dq", "dkv") for kind in kinds]
    assert [row.body.compares for row in rows[: len(kinds)]] == sorted(one.compares for one in bodies)


@pytest.mark.parametrize(
    "contender, bodies, message",
    [
        ("splash", [body(), body(compares=1)], "forward has 1000 .* 1000 bundles"),
        ("attnlab", [body(loops=2)], "forward has .*without a loop"),
        ("attnlab", [body(), body()], "forward has .*more comparisons"),
        ("attnlab", [body(), body(matmuls=2, compares=1)], "forward has .*as many matmuls"),
        ("attnlab", [], "matrix products: none"),
    ],
    ids=["two of splash", "loop", "alike", "other products", "none"],
)
def test_unexpected_bodies_are_errors(contender, bodies, message):
    with pytest.raises(ValueError, match=message):
        bench.rows_of(bench.Call(64, "causal", contender), kernels(contender, *bodies))


def test_floor_is_that_of_documented_matrix_units_alone():
    assert [bench.floor("forward", (512, 512), 128, chip) for chip in ("v4", "v5e", "v5p")] == [1024] * 3
    assert bench.floor("forward", (512, 512), 128, "v6e") is None


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--topology=h100", "--topology=h100 .*v5e"),
        ("--topology=v5f", "--topology=v5f .*did you mean v5"),
        ("--cases=casual", "--cases: 'casual' .*did you mean causal"),
        ("--contenders=", "--contenders is empty"),
        ("--head_dims=0", "--head_dims=0: "),
        ("--block_sizes=512", "--block_sizes=512: .*128"),
        ("--block_sizes=512,100", "--block_sizes=512,100: .*128"),
        (f"--json={__file__}", "test_bench_bundles.py exists"),
    ],
)
def test_invalid_flag_is_one_line(error_line, flag, message):
    assert re.search(message, error_line("bundles", flag))


@pytest.fixture
def compiled(monkeypatch):
    """Stands in for the compiler: attnlab has two bodies but for the full case, splash one and no ALiBi."""

    def measure(compilers, call, block_sizes):
        if (call.contender, call.case) == ("splash", "alibi"):
            raise bench.UserError("it has no ALiBi")
        bodies = [body(900)] if call.contender == "attnlab" else [body(compares=1)]
        if call.contender == "attnlab" and call.case != "full":
            bodies.append(body(1100, compares=256))
        return kernels(call.contender, *bodies)

    monkeypatch.setattr(bench._Compilers, "kernels", measure)
    monkeypatch.setattr(topologies, "find", lambda name: None)
    monkeypatch.setattr(attnlab, "implementations", lambda: ("pallas", "splash"))
    monkeypatch.setattr(bench.metadata, "version", lambda name: "0.1")


def test_tables_compare_passes_and_name_the_bound(compiled, figures_of, capsys):
    figures = figures_of("bundles", "--cases=full,alibi,causal", "--head_dims=128")
    out = capsys.readouterr().out
    assert out.count("Bundles, a lower bound of cycles") == 2 and out.count("not a time") == 2
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert ["forward  D = 128 causal", "1,024", "1,000", "900 (0.90)", "1,100 (1.10)"] in lines
    assert ["backward D = 128 causal", "3,584", "2,000", "1,800 (0.90)", "2,200 (1.10)"] in lines
    assert ["backward D = 128 full", "3,584", "2,000", "1,800 (0.90)", ""] in lines
    assert ["forward  D = 128 alibi", "1,024", "–", "900", "1,100"] in lines
    assert "– D = 128, alibi, splash: it has no ALiBi" in out
    assert figures["refused"] == [
        {"head_dim": 128, "case": "alibi", "contender": "splash", "reason": "it has no ALiBi"}
    ]
    assert len(figures["bodies"]) == 3 + 3 + 6 + 6 + 3 and "lower bound of cycles" in figures["meaning"]


def test_contender_without_a_backend_is_left_out(compiled, monkeypatch, capsys, figures_of):
    monkeypatch.setattr(attnlab, "implementations", lambda: ("splash",))
    figures = figures_of("bundles", "--cases=full", "--head_dims=64")
    assert "attnlab is left out: attention has no impl='pallas'" in capsys.readouterr().out
    assert {row["contender"] for row in figures["bodies"]} == {"splash"}
