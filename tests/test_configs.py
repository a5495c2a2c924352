"""Every experiment in configs/ builds, is documented, and can train."""

import importlib.util
import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from attnlab import config as configs
from attnlab import experiments
from attnlab.nn import GPT
from attnlab.support.errors import UserError

REPOSITORY = Path(__file__).parents[1]
FILES = sorted((REPOSITORY / "configs").glob("*.py"))


def module(file):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def parameters(config, vocab_size):
    model = GPT(configs.completed(config).over_tokens(vocab_size))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("named", experiments.names())
def test_experiment_builds_and_documents_its_command(named):
    name, _, variant = named.partition(":")
    file = module(experiments.files()[name])
    assert bool(inspect.signature(file.get_config).parameters) == bool(variant)
    config = configs.completed(file.get_config(*[variant] * bool(variant)))
    assert f"attnlab train --config={name}" in file.__doc__
    config.check_effects()
    assert parameters(config, vocab_size=100) > 10_000


def test_model_sizes_match_nanogpt_and_gpt2():
    by_name = {file.stem: module(file).get_config() for file in FILES}
    # nanoGPT's CPU recipe has 804,096 parameters at 65 characters, 8,192 of them for learned positions. Rotary ones
    # have none, and the two norms of queries and keys have 256.
    assert parameters(by_name["quickstart"], 65) == 804_096 - 64 * 128 + 4 * 2 * 32
    gpt2 = by_name["gpt2_124m"]
    # Without GPT-2's biases (11 times the width per block, the width once at the end), with a padded vocabulary.
    assert parameters(gpt2, 256) == 124_439_808 - (12 * 11 + 1) * 768 + (50_304 - 50_257) * 768
    assert by_name["quickstart"].steps * by_name["quickstart"].batch_size * 64 == 2000 * 768
    small = by_name["gpt_30m"]
    assert parameters(small, small.data.vocab_size) == 29_369_856 and small.steps * small.batch_size * 512 > 6e8


def test_config_round_trips_through_json():
    config = configs.RunConfig.of({"model.attention.window": 7, "steps": 9})
    saved = configs.from_json(json.loads(configs.to_json(config)))
    assert saved == config
    config = config.changed({"parallel.strategy": "pmap", "checkpoint.every": 3, "log.every": 7})
    assert config.difference(saved) == ""
    assert config.changed({"seed": 5}).difference(saved) == "config.seed = 5, but it was 0"


def test_files_in_the_current_folder_do_not_shadow_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "mine", "mine.py"):
        Path(name).write_text("raise SystemExit('executed')")
    assert experiments.find("quickstart") == str(REPOSITORY / "configs" / "quickstart.py")
    assert experiments.find("mine.py") == "mine.py" and experiments.find("./mine:small") == "./mine:small"
    with pytest.raises(UserError, match="--config=mine: "):
        experiments.find("mine")
