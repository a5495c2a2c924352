"""Which steps are traced, and that a run continues if tracing fails."""

from unittest import mock

import jax
import pytest

from attnlab.training.profiling import Profiler


@pytest.fixture
def profiler_calls(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("written"))
    return calls


@pytest.mark.parametrize(
    "requested, start, last, traced",
    [
        ((3, 5), 0, 9, [3, 4, 5]),
        ((1, 2), 0, 9, [1, 2]),
        ((3, 5), 2, 9, [3, 4, 5]),  # with the first step after a resume, because it was requested
        ((3, 9), 4, 9, [6, 7, 8, 9]),  # step 5 compiles
        ((3, 5), 4, 9, []),
        ((3, 5), 5, 9, []),
        ((3, 9), 0, 4, [3, 4]),
        (None, 0, 9, []),
    ],
    ids=str,
)
def test_trace_covers_the_requested_steps_that_remain(profiler_calls, tmp_path, requested, start, last, traced):
    lines, steps = [], []
    with Profiler(requested, start, tmp_path, lines.append) as profiler:
        for step in range(start + 1, last + 1):
            with profiler.step(step):
                if profiler_calls == [tmp_path]:
                    steps.append(step)
            profiler.written(step, ())
    assert steps == traced
    assert profiler_calls == ([tmp_path, "written"] if traced else [])
    assert len(lines) == (requested is not None)
    assert not lines or ("the trace is in" if traced else f"because the run resumes from step {start}") in lines[0]


@pytest.mark.parametrize("broken", ["start_trace", "stop_trace"])
def test_failed_trace_is_reported_in_one_line(profiler_calls, monkeypatch, tmp_path, broken):
    error = RuntimeError("Only one profile may be run at a time.\nmore")
    monkeypatch.setattr(jax.profiler, broken, mock.Mock(side_effect=error))
    lines = []
    with Profiler((1, 1), 0, tmp_path, lines.append) as profiler, profiler.step(1):
        pass
    assert lines == ["config.log.profile: no trace (Only one profile may be run at a time.)"]
