"""One device, `pmap` over four and meshes of four compute the same run, up to rounding."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from attnlab import config as configs
from attnlab.data.batches import TrainBatches
from attnlab.planning import programs
from attnlab.support.errors import UserError
from attnlab.training import metrics, parallel, state
from tests.training.layouts import LAYOUTS, TOKENS, distance, experiment, gradient

ROOT = Path(__file__).parents[2]
AXES = ("pmap", "tensor", "fsdp and context")  # the last two use every axis of the mesh


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "layouts, options",
    [SLOW(AXES, {"dropout": 0.2, "accumulation": 4}), SLOW(LAYOUTS, {"dropout": 0.2, "scan": True, "num_layers": 2})],
    ids=str,
)
def test_first_gradient_on_four_devices_equals_one_device(layouts, options):
    reference = gradient(experiment("mesh", 1, **options | {"accumulation": 1}))
    for name in layouts:
        assert distance(gradient(experiment(*LAYOUTS[name], **options)), reference) < 1e-6, name
    if "dropout" in options:
        without = options | {"accumulation": 1, "dropout": 0.0}
        assert distance(gradient(experiment("mesh", 1, **without)), reference) > 0.1


def test_gradients_of_all_parts_are_summed_over_devices_once_per_step():
    computations = programs.parse(experiment(*LAYOUTS["tensor"], accumulation=4).lower().compile().as_text())
    summed = [line for lines in computations.values() for line in lines if line.opcode.startswith("all-reduce")]
    locations = [line.computation for line in summed if "f32[31,32]" in line.shape]
    assert locations == ["ENTRY"]  # not in the loop over parts


@pytest.mark.parametrize(
    "options",
    [{"positions": "learned", "remat": "block"}, SLOW({"positions": "alibi", "attention.window": 5})],
    ids=str,
)
def test_gradient_of_split_sequences_equals_one_device_for_all_positions(options):
    reference = gradient(experiment("mesh", 1, **options))
    assert distance(gradient(experiment(*LAYOUTS["context"], **options)), reference) < 1e-6


def test_gradient_of_packed_documents_is_independent_of_batch_split():
    starts = np.sort(np.random.default_rng(1).choice(len(TOKENS), 700, replace=False))
    packed = TrainBatches(TOKENS, context=16, batch_size=16, seed=0, documents=np.r_[0, starts].astype(np.int64))
    counts = state.counted(packed[0]).reshape(4, -1).sum(axis=1)
    assert len(set(counts.tolist())) > 1  # devices count different numbers of targets
    options = {"packing": "documents", "dropout": 0.2}
    reference = gradient(experiment("mesh", 1, **options), packed)
    for name in AXES:
        actual = gradient(experiment(*LAYOUTS[name], accumulation=2, **options), packed)
        assert distance(actual, reference) < 1e-6, name


@pytest.mark.parametrize(
    "axes, split", [((4, 1), ("kernel", "embedding")), ((1, 4), ("kernel",))], ids=["fsdp", "tensor"]
)
def test_each_device_holds_a_share_of_every_kernel_embedding_and_moment(axes, split):
    """Embeddings are an exception along "tensor": 4 devices do not divide a vocabulary of 31."""
    now = experiment("mesh", 1, *axes).abstract_state
    for path, leaf in jax.tree_util.tree_leaves_with_path(now):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        share = np.prod(leaf.sharding.shard_shape(leaf.shape)) / leaf.size
        assert share == (0.25 if name.endswith(split) else 1), name


EIGHT_DEVICES = """
import numpy as np
from tests.training.layouts import experiment, losses
options = {"dropout": 0.2, "steps": 20, "scan": True, "num_layers": 2}
one, split = (losses(experiment("mesh", *axes, **options)) for axes in ((1,), (2, 2, 2)))
print(np.abs(split / one - 1).max())
"""


@pytest.mark.slow
def test_losses_on_a_mesh_of_eight_devices_equal_one_device():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-c", EIGHT_DEVICES]
    printed = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    assert float(printed) < 1e-5  # sums in another order


@pytest.mark.campaign
@pytest.mark.parametrize("window", [1024, None], ids=str)
def test_windows_of_131072_tokens_train_over_fsdp_and_context(tmp_path, window):
    options = {
        "steps": 2, "batch_size": 2, "model.num_layers": 1, "model.num_heads": 1, "model.width": 8,
        "model.context": 131_072, "data.validation_fraction": 0.3, "eval.windows": 1, "optimizer.warmup_steps": 0,
        "parallel.mesh.data": 1, "parallel.mesh.fsdp": 2, "parallel.mesh.context": 4, "sample.every": 0,
        "model.attention.qk_norm": False, "log.every": 1, "log.tensorboard": False, "sample.length": 1,
    }  # fmt: skip
    options |= {"model.attention.window": window} if window else {}
    command = [sys.executable, "-m", "attnlab.train", "--config=quickstart", f"--workdir={tmp_path}"]
    command += [f"--config.{name}={value}" for name, value in options.items()]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records = metrics.read(tmp_path / "metrics.jsonl")
    first, second = (record["loss"] for record in records if record["split"] == "train")
    assert second < first < 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model.context": 66, "parallel.mesh.context": 4}, "context = 66 .*mesh.context = 4: use 64 or 68, or fewer"),
        (
            {"model.width": 36, "model.num_heads": 2, "parallel.mesh.fsdp": 8},
            "model.width = 36 .*mesh.fsdp = 8: use 32 or 40",
        ),
        ({"model.num_heads": 3, "model.width": 48, "parallel.mesh.tensor": 2}, "num_heads = 3 .*mesh.tensor = 2"),
        ({"model.attention.kv_heads": 1, "parallel.mesh.tensor": 2}, "kv_heads = 1 .*mesh.tensor = 2: use 2, or"),
        ({"batch_size": 30, "optimizer.accumulation": 2}, "batch_size = 30 .*4 × 2 = 8: use 24 or 32"),
    ],
    ids=str,
)
def test_indivisible_size_error_names_the_nearest_divisible_sizes(fields, message):
    parallel.check_shares(configs.RunConfig(), 4)
    with pytest.raises(UserError, match=message):
        parallel.check_shares(configs.RunConfig.of(fields), 4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("mesh", 5), "data = 5"),
        (("mesh", 0), "data = 0"),
        (("pmap", 2), "data = 2"),
        (("mesh", -1, 3), "fsdp = 3"),
        (("mesh", -1, 0), "fsdp = 0"),
        (("pmap", -1, 2), "fsdp = 2"),
        (("mesh", -1, 2, 4), "tensor = 4"),
    ],
    ids=str,
)
def test_make_with_impossible_axis_sizes_raises(arguments, message):
    with pytest.raises(UserError, match=rf"mesh\.{message}, .*4 devices"):
        parallel.make(*arguments)
