"""The benchmark of the data pipeline."""

import pytest

from attnlab._benchmarks import data
from attnlab.support.errors import UserError


def test_data_writes_a_table_and_figures(in_process, figures_of, capsys):
    figures = figures_of("data", in_process, "--rounds=1", "--seconds=1", "--batches=50")
    out = capsys.readouterr().out
    assert "tiny: starting attnlab" in out and "tiny: round 1 of 1" in out and "waiting" in out
    assert set(figures) == {f"{name}_tiny" for name in ("ratio_data", "data_wait_share", "step_ms", "batch_ms")}
    assert 0 < figures["data_wait_share_tiny"] < 1 and min(figures.values()) > 0


@pytest.mark.campaign
def test_large_text_is_tokenised_and_trained_on(figures_of, tmp_path, capsys):
    figures = figures_of("data", "--size=300KB", f"--folder={tmp_path}/new", "--steps=3")
    names = ("mb_s_core", "mb_s_cpu", "first_s", "open_s", "peak_mib")
    expected = {f"{kind}_{name}" for kind in ("byte", "bpe") for name in names}
    assert set(figures) == expected | {"read_mb_s", "train_peak_mib", "train_small_peak_mib"}
    assert min(figures.values()) >= 0 and "opened again in" in capsys.readouterr().out
    assert (tmp_path / "new" / "text.txt").stat().st_size == 300_000


@pytest.mark.parametrize("size", ["4", "GB", "0MB", "4TB", "-1MB"])
def test_size_without_number_or_unit_is_refused(size):
    with pytest.raises(UserError, match=f"--size={size}: .*GB"):
        data.bytes_of(size)
