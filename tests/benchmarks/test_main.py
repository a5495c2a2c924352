"""`python -m attnlab.bench`."""

from attnlab.bench import main
from attnlab.support import shipped


def test_bench_without_a_name_lists_the_benchmarks(capsys):
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in shipped.files("benchmarks"))


def test_bench_unknown_name_is_one_line(error_line):
    message = "unknown benchmark 'atention' (did you mean attention?): use one of attention, data"
    assert message in error_line("atention")


def test_bench_help_shows_the_flags_of_a_benchmark(capsys):
    assert main(["bench", "decode", "--help"]) == 0
    assert "--num_samples: texts sampled in parallel (default: 1)" in capsys.readouterr().out
