"""Topologies: names, shapes and errors everywhere; devices of other machines where their compilers are installed."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import pytest

from attnlab.planning import topologies
from attnlab.support.errors import UserError


def test_here_is_every_device_of_this_machine():
    topology = topologies.find("here")
    assert topology.devices == jax.devices() and topology.platform == "cpu"
    assert topology.usable_gib is None


@pytest.mark.parametrize(
    "name, message",
    [
        ("v5", "--topology=v5 .*did you mean v5e"),
        ("v5e:", "--topology=v5e: .*did you mean v5e"),
        ("h100:9", "--topology=h100:9: .*h100:8"),
        ("v5e:0x1", "--topology=v5e:0x1: .*v5e:2x2"),
        ("v5e:2x2x1", "--topology=v5e:2x2x1: .*v5e:2x2"),
        ("v5e:32x32", "--topology=v5e:32x32 .*1024 chips.*256"),
    ],
)
def test_wrong_name_says_what_is_expected(name, message):
    with pytest.raises(UserError) as caught:
        topologies.find(name)
    assert re.match(message, str(caught.value)) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, package, remedy",
    [("v5e:2x2", "libtpu", "needs libtpu: pip install 'jax[tpu]'"), ("h100", "jax_plugins", "pip install --upgrade")],
)
def test_missing_package_is_named_with_its_remedy(monkeypatch, name, package, remedy):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(UserError, match=f"--topology={name} needs .*") as caught:
        topologies.find(name)
    assert remedy in str(caught.value)


def test_plugin_without_a_description_of_the_gpu_is_refused(monkeypatch, tmp_path):
    (tmp_path / "xla_cuda13").mkdir()
    (tmp_path / "xla_cuda13" / "xla_cuda_plugin.so").write_bytes(b'gpu_device_info {\nname: "A100"\0')
    spec = importlib.machinery.ModuleSpec("jax_plugins", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(UserError, match="--topology=h100: .*pip install"):
        topologies.find("h100")


def test_other_hardware_is_refused_after_jax_has_started_on_a_device(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(UserError, match="needs JAX on CPUs, but it has started on a gpu"):
        topologies.prepare("v5e")


SCRIPT = """
import json, sys
from attnlab.support.errors import UserError
from attnlab.planning import topologies
found = {}
for name in sys.argv[1:]:
    try:
        topology = topologies.find(name)
        found[name] = [topology.platform, len(topology.devices), topology.devices[0].device_kind]
    except UserError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def found(*names):
    """Platform, number and kind of devices by name, from a subprocess that has loaded no compiler."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.hardware
def test_tpu_slices_have_all_their_devices_or_are_refused_in_one_line():
    pytest.importorskip("libtpu")
    devices = {"v4": 1, "v4:2x2x1": 4, "v5e:4x4": 16, "v5p:2x2x2": 8, "v6e": 1, "tpu7x": 2, "tpu7x:2x2x1": 8}
    slices = found(*devices, "v5e:3x3")
    message = slices.pop("v5e:3x3")
    assert message.startswith("--topology=v5e:3x3 is refused by its compiler") and "not divisible" in message
    assert {name: one[:2] for name, one in slices.items()} == {name: ["tpu", n] for name, n in devices.items()}


@pytest.mark.hardware
def test_h100s_are_described_with_their_kind():
    pytest.importorskip("jax_plugins.xla_cuda13")
    if jax.__version_info__ < (0, 12):
        pytest.skip("the CUDA plugin describes H100s since JAX 0.12")
    kind = "NVIDIA H100 80GB HBM3"
    assert found("h100", "h100:8") == {"h100": ["gpu", 1, kind], "h100:8": ["gpu", 8, kind]}
