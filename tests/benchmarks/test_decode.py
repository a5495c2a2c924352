"""The benchmark of sampling."""


def test_decode_writes_a_table_and_figures(in_process, peer, figures_of, capsys):
    figures = figures_of("decode", in_process, *peer(), "--tokens=12", "--num_samples=2", "--rounds=1")
    out = capsys.readouterr().out
    assert "tiny: round 1 of 1" in out and "sampling, 2 × 12 tokens" in out and "first token, ms" in out
    rates = {"tokens_per_second_tiny_attnlab", "tokens_per_second_tiny_nanoGPT"}
    assert set(figures) == rates | {"ratio_decode_tiny", "first_token_ms_tiny"}
    assert figures["tokens_per_second_tiny_nanoGPT"] == 2 * 12 / 2
    assert 0 < figures["first_token_ms_tiny"] < 2 * 12e3 / figures["tokens_per_second_tiny_attnlab"]
