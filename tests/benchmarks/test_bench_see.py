"""The benchmark of activation patching. No test asserts a time."""

import importlib.util
import sys

import numpy as np
import pytest

from attnlab._benchmarks import see
from attnlab._benchmarks.harness import workers
from attnlab._benchmarks.harness.patching import Patching
from attnlab._benchmarks.harness.transformerlens import TransformerLens

QUICK = ["--sizes=tiny", "--rounds=1", "--length=6", "--vocab_size=11"]
INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("transformer_lens") is None, reason="transformer-lens is not installed: make peers"
)


class Shifted(Patching):
    """A peer that finds other effects."""

    def patch(self):
        answer = super().patch()
        return answer | {"values": (np.array(answer["values"]) * [1, 2]).tolist()}


@pytest.fixture
def in_this_process(monkeypatch, own_errors):  # the last position alone is not of the annotated length
    """Runs the contenders here, on a tiny model; returns a function that sets the peer, None for no peer."""
    monkeypatch.setitem(see.SIZES, "tiny", {"num_layers": 2, "num_heads": 2, "width": 8})

    class InProcess:
        peak_mib = None

        def __init__(self, command, log):
            self.create = Patching if "harness.patching" in command else peers[0]

        def ask(self, what, **request):
            if what == "start":
                self.worker = self.create(**request)
                return {}
            return getattr(self.worker, what)()

        def close(self):
            pass

    peers = []
    monkeypatch.setattr(workers, "Worker", InProcess)

    def use(peer):
        peers[:] = [peer]
        monkeypatch.setattr(see, "_lens_python", lambda given: sys.executable if peer else None)

    return use


@INSTALLED
def test_see_finds_the_effects_of_transformer_lens(in_this_process, figures_of, capsys):
    in_this_process(TransformerLens)
    figures = figures_of("see", *QUICK)
    assert "tiny, TransformerLens" in capsys.readouterr().out
    assert figures["difference_tiny_attnlab"] < 1e-6 and figures["difference_tiny_attnlab_last"] < 1e-6
    kinds = ("seconds", "first_seconds", "peak_mib")
    expected = {f"{kind}_tiny_{name}" for kind in kinds for name in ("attnlab", "attnlab_last", "TransformerLens")}
    expected |= {f"{kind}_tiny_{name}" for kind in ("ratio", "difference") for name in ("attnlab", "attnlab_last")}
    assert set(figures) == expected


@pytest.mark.slow
def test_see_alone_has_no_ratio(in_this_process, figures_of):
    in_this_process(None)
    figures = figures_of("see", *QUICK)
    assert figures["seconds_tiny_attnlab"] > 0
    assert not [name for name in figures if name.startswith(("ratio", "difference"))]


def test_see_with_other_effects_is_one_line(in_this_process, error_line):
    in_this_process(Shifted)
    assert "the effects of attnlab and TransformerLens differ by" in error_line("see", *QUICK)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--lens_python=/no/python", "--lens_python=/no/python cannot be started"),
        ("--lens_python=/bin/false", "--lens_python=/bin/false has no transformer-lens"),
        ("--rounds=0", "--rounds=0"),
        ("--sizes=huge", "--sizes: 'huge' is unknown"),
        ("--vocab_size=1", "--vocab_size=1"),
    ],
)
def test_see_flag_that_does_not_fit_is_one_line(error_line, flag, message):
    assert message in error_line("see", flag)
