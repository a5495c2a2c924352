"""The benchmark of the data pipeline."""


def test_data_writes_a_table_and_figures(in_process, figures_of, capsys):
    figures = figures_of("data", in_process, "--rounds=1", "--seconds=1", "--batches=50")
    out = capsys.readouterr().out
    assert "tiny: starting attnlab" in out and "tiny: round 1 of 1" in out and "waiting" in out
    assert set(figures) == {f"{name}_tiny" for name in ("ratio_data", "data_wait_share", "step_ms", "batch_ms")}
    assert 0 < figures["data_wait_share_tiny"] < 1 and min(figures.values()) > 0
