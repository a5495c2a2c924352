"""Safetensors files: several per model, 16-bit types, sharded parameters, and the memory that loading needs."""

import dataclasses
import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from attnlab.interop.huggingface import from_hf, make_model, model_files, save_hf
from attnlab.nn import stack_layers
from attnlab.support.errors import UserError
from attnlab.training import parallel
from tests.interop.huggingface_peers import gpt2, kept
from tests.parameters import parameters

# Every kind of tensor: fused, transposed, vectors, odd sizes.
PHI3 = make_model(kept("phi3")[1]).replace(num_layers=3)
GPT2 = gpt2(vocab_size=66, num_layers=2, num_heads=4, width=24, context=32)
MODELS = {"phi3": PHI3, "gpt2": GPT2}


@functools.cache
def params_of(name):
    return parameters(MODELS[name], np.zeros((1, 1), np.int32))


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_hf(tmp_path_factory.mktemp("hub") / name, MODELS[name], params_of(name)) for name in MODELS}


def test_concurrent_writers_of_a_folder_do_not_mix_files(tmp_path, monkeypatch):
    write = model_files.write_tensors

    def interrupted(*arguments):
        monkeypatch.undo()
        save_hf(tmp_path / "model", PHI3, params_of("phi3"))
        write(*arguments)

    monkeypatch.setattr(model_files, "write_tensors", interrupted)
    with pytest.raises(UserError, match="model cannot be written \\(Directory not empty\\)"):
        save_hf(tmp_path / "model", GPT2, params_of("gpt2"))
    assert_equal(from_hf(tmp_path / "model")[1], params_of("phi3"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_files_are_compatible_with_the_safetensors_library(folders, tmp_path):
    """The library reads our files, and we read the library's."""
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    for name, folder in folders.items():
        state = library.load_file(folder / "model.safetensors")
        assert all(array.dtype == np.float32 for array in state.values())
        library.save_file(state, tmp_path / "again.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        model, params = from_hf(tmp_path / "again.safetensors")
        assert model == MODELS[name] and model == from_hf(folder)[0]
        assert_equal(params, params_of(name))


def test_large_models_are_saved_as_several_files_with_an_index(tmp_path):
    folder = save_hf(tmp_path / "several", PHI3, params_of("phi3"), max_shard_bytes=40_000)
    files = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert {folder / name for name in index["weight_map"].values()} == set(files)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params_of("phi3")))
    assert all(file.stat().st_size < 41_500 for file in files)  # with their headers
    assert_equal(from_hf(folder)[1], params_of("phi3"))
    library = pytest.importorskip("safetensors.numpy")
    first, last = (library.load_file(file) for file in (files[0], files[-1]))
    stale = {name: np.zeros_like(tensor) for name, tensor in first.items()}
    library.save_file(last | stale, files[-1], metadata={"format": "pt"})
    assert_equal(from_hf(folder)[1], params_of("phi3"))  # the index says which file has a tensor
    library.save_file({}, files[0], metadata={"format": "pt"})
    with pytest.raises(UserError, match="model-00001-of-.* has no tensor .*model.safetensors.index.json says"):
        from_hf(folder)
    library.save_file(first, files[0], metadata={"format": "pt"})
    (folder / "model.safetensors").touch()
    with pytest.raises(UserError, match="several has both model.safetensors and model.safetensors.index.json"):
        from_hf(folder)
    (folder / "model.safetensors").unlink()
    files[1].unlink()
    with pytest.raises(UserError, match="model-00002-of-.* is missing"):
        from_hf(folder)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_16_bit_files_round_trip_bit_for_bit(dtype, tmp_path):
    rounded = jax.tree.map(lambda x: x.astype(dtype), params_of("phi3"))
    folder = save_hf(tmp_path / "half", PHI3, params_of("phi3"), dtype=dtype)
    assert json.loads((folder / "config.json").read_text())["dtype"] == jnp.dtype(dtype).name
    wide = from_hf(folder)[1]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(wide))
    assert_equal(wide, jax.tree.map(lambda x: x.astype(np.float32), rounded))
    narrow = from_hf(folder, dtype=dtype)[1]
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(narrow))
    assert_equal(narrow, rounded)
    again = save_hf(tmp_path / "again", PHI3, wide, dtype=dtype)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_missing_library_raises_one_line_with_the_command(folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (lambda: from_hf(folders["gpt2"]), lambda: save_hf(tmp_path / "new", GPT2, params_of("gpt2"))):
        with pytest.raises(UserError, match=r"needs safetensors: pip install 'attnlab\[hf\]'$"):
            call()


def test_unsupported_types_are_rejected(folders, tmp_path):
    for call in (lambda: from_hf(folders["gpt2"], dtype=jnp.int32), lambda: save_hf(tmp_path, GPT2, {}, dtype=None)):
        with pytest.raises(UserError, match="dtype = .*float16"):
            call()


@pytest.mark.parametrize("name, mesh", [("phi3", {"fsdp": 2, "tensor": 2}), ("gpt2", {"fsdp": 4})], ids=str)
def test_parameters_load_with_their_shardings(name, mesh, folders):
    """Shardings are a function of shapes or a tree; if the tree's layers are stacked, so are the parameters."""
    on = parallel.make("mesh", **mesh)
    by_function = from_hf(folders[name], shardings=on.shardings)[1]["params"]
    expected = on.shardings(params_of(name)["params"])
    assert jax.tree.map(lambda x: x.sharding, by_function) == expected
    assert_equal(by_function, params_of(name)["params"])
    stacked = stack_layers(params_of(name)["params"])
    by_tree = from_hf(folders[name], shardings=on.shardings(stacked))[1]["params"]
    assert_equal(by_tree, stacked)
    assert any(len(x.addressable_shards[0].data.ravel()) < x.size for x in jax.tree.leaves(by_tree))
    kernel = by_tree["blocks"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size * np.prod(list(mesh.values())) == kernel.size


def test_any_axis_may_be_split(folders):
    """Even axes that no run splits, such as the features of a head."""
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))

    def split(x, axis):
        axis = min(axis, x.ndim - 1)
        return NamedSharding(devices, PartitionSpec(*("x" if n == axis else None for n in range(x.ndim))))

    for axis in range(3):
        loaded = from_hf(folders["gpt2"], shardings=lambda shapes, n=axis: jax.tree.map(lambda x: split(x, n), shapes))
        assert_equal(loaded[1], params_of("gpt2"))


LIMITED = """
import resource, sys
import jax, jax.numpy as jnp
from attnlab.interop.huggingface import from_hf
import safetensors

jnp.ones(3).block_until_ready()
before = 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (before + int(sys.argv[2]), resource.RLIM_INFINITY))
from_hf(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_needs_little_more_memory_than_the_parameters(tmp_path):
    """Parameters take 300 MB, a third of it in the embedding; pages of the mapped file are not counted."""
    layer = dataclasses.replace(PHI3.config.layer(0), head_dim=64)
    model = PHI3.replace(vocab_size=50_000, num_layers=8, num_heads=8, width=512, mlp_ratio=6.0, layers=(layer,))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes)
    folder = save_hf(tmp_path / "large", model, params, dtype=jnp.bfloat16)
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(shapes))

    def load(times):
        command = [sys.executable, "-c", LIMITED, str(folder), str(int(times * size))]
        return subprocess.run(command, capture_output=True, text=True)

    # 1 for the parameters; the rest for a chunk of 16 MiB, its copy in another type, and what Python and threads need.
    assert load(1.4).returncode == 0
    assert load(0.9).returncode != 0
