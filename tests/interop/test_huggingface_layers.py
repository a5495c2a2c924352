"""Layers of single families: their places, the names and order of their tensors, and failed exports."""

import json

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from attnlab.interop.huggingface import from_hf, make_config, make_model, save_hf, to_hf
from attnlab.masks import Causal, MaskFn, SlidingWindow
from attnlab.nn import GPT, MultiHeadAttention, Rotary, register, stack_layers
from attnlab.score_mods import SoftCap
from attnlab.support.errors import UserError
from attnlab.training import parallel
from tests.interop.huggingface_peers import RECURRENT, assert_same, kept, ours, tokens
from tests.parameters import parameters

# Grouped projections, convolutions, vectors; one layer more than whole periods. All sizes are even.
HYBRID = make_model(kept("qwen3_next")[1]).replace(vocab_size=66, num_layers=5)


def test_stacked_hybrid_loads_and_saves_unchanged(tmp_path):
    params = parameters(HYBRID, np.zeros((1, 1), np.int32))
    folder = save_hf(tmp_path / "hybrid", HYBRID, params, max_shard_bytes=20_000)
    stacked = stack_layers(params["params"])
    assert {"blocks_0", "blocks_1", "block_4"} <= stacked.keys()
    loaded = from_hf(folder, shardings=parallel.make("mesh", fsdp=2).shardings(stacked))[1]["params"]
    jax.tree.map(np.testing.assert_array_equal, loaded, stacked)
    again = save_hf(tmp_path / "again", HYBRID, {"params": stacked}, max_shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    for file in folder.glob("*.safetensors"):
        assert (again / file.name).read_bytes() == file.read_bytes()


def renamed(folder, names, splits):
    """Rename the tensors of a file, and split some along their first axis."""
    path, state = folder / "model.safetensors", {}
    for name, array in safetensors_numpy.load_file(path).items():
        parts = splits.get(".".join(name.split(".")[-2:]))
        for old, new in names.items():
            name = name.replace(old, new)
        if parts is None:
            state[name] = array
        else:
            pieces = np.split(array, np.cumsum(list(parts.values()))[:-1])
            state |= {name.replace("conv1d", part): piece for part, piece in zip(parts, pieces)}
    safetensors_numpy.save_file(state, path)


def test_olmo_hybrid_files_split_the_convolution_into_three_tensors(tmp_path):
    """transformers 5 saves it in equal parts, whatever the sizes of keys and values."""
    folder = save_hf(tmp_path / "olmo", *ours("olmo_hybrid"), model_type="olmo_hybrid")
    names = {"0.input_layernorm": "0.attention_layer_norm"}
    names |= {f"{n}.post_attention_layernorm": f"{n}.feedforward_layer_norm" for n in range(2)}
    renamed(folder, names, {"conv1d.weight": {"q_conv1d": 15, "k_conv1d": 15, "v_conv1d": 14}})
    assert_same(from_hf(folder), ours("olmo_hybrid"))


def test_old_mamba2_files_with_singular_embedding_name_load(tmp_path):
    folder = save_hf(tmp_path / "mamba2", *ours("mamba2"))
    renamed(folder, {"backbone.embeddings.": "backbone.embedding."}, {})
    assert_same(from_hf(folder), ours("mamba2"))


@pytest.mark.parametrize(
    "family, tensor",
    [
        ("qwen3_next", "mtp.norm.weight"),  # in a multi-token prediction head
        ("diffllama", "model.layers.0.self_attn.groupnorm.weight"),  # transformers has no such tensor
        ("deepseek_v3", "model.layers.2.mlp.up_proj.weight"),  # no prediction head, because it has no eh_proj
        ("deepseek_v3", "model.layers.1.eh_proj.weight"),
    ],
)
def test_unknown_tensor_raises_by_name(family, tensor):
    state, config = kept(family)
    with pytest.raises(UserError, match=f"holds the tensor {tensor}, which the model does not have"):
        from_hf(state | {tensor: np.ones(16, np.float32)}, config)


LAYERS = [
    ("qwen3_next", {"full_attention_interval": 4}, "gated_delta gated_delta gated_delta attention"),
    ("qwen3_next", {"full_attention_interval": 1}, "attention"),
    ("qwen3_next", {"layer_types": [RECURRENT] * 6}, "gated_delta"),
    ("olmo_hybrid", {"num_hidden_layers": 3}, "gated_delta gated_delta attention"),
    ("bamba", {"attn_layer_indices": [2, 77]}, "mamba2 mamba2 attention mamba2"),
    ("bamba", {"attn_layer_indices": None}, "mamba2"),
    ("bamba", {"attn_layer_indices": list(range(6))}, "attention"),
    ("mamba2", {}, "mamba2"),
]


@pytest.mark.parametrize("name, options, pattern", LAYERS, ids=str)
def test_attention_layers_are_placed_by_the_options_of_the_family(name, options, pattern):
    model = make_model(kept(name)[1] | {"num_hidden_layers": 6, "layer_types": None} | options)
    assert " ".join(layer.kind for layer in model.config.layers) == pattern
    assert model == make_model(make_config(model, name))


@pytest.mark.parametrize("name", ["diffllama-2", "deepseek_v3", "qwen3_next"])
def test_file_is_read_in_chunks(name, monkeypatch, tmp_path):
    """Chunks of three rows; the order of rows follows the parameters."""
    state, config = kept(name)
    safetensors_numpy.save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("attnlab.interop.tensors._CHUNK", 4 * 3 * 48)
    assert_same(from_hf(tmp_path), ours(name))


def test_only_rope_interleave_reorders_pairs_into_halves():
    state, config = kept("deepseek_v3")
    pairs, halves = (from_hf(state, config | {"rope_interleave": flag}) for flag in (True, False))
    assert pairs[0] == halves[0]
    pair_params, half_params = (params["params"]["block_1"]["attention"] for _, params in (pairs, halves))
    for name in ("query", "rotary"):
        one, other = (x[name]["kernel"][..., -6:] for x in (pair_params, half_params))
        np.testing.assert_array_equal(one, other[..., [0, 2, 4, 1, 3, 5]])
    for name in ("latent", "key", "value", "out", "query_down", "query_norm", "latent_norm"):
        jax.tree.map(np.testing.assert_array_equal, pair_params[name], half_params[name])


def test_prediction_heads_of_deepseek_are_ignored():
    state, config = kept("deepseek_v3")
    assert config["num_nextn_predict_layers"] == 1
    extra = {f"model.layers.2.{part}.weight": np.ones((3, 4), np.float32) for part in ("eh_proj", "shared_head.head")}
    assert_same(from_hf(state | extra, config), ours("deepseek_v3"))


# With six value heads, the permutation from our order of pairs to theirs is not its own inverse.
DIFFERENTIAL = make_model(kept("diffllama")[1] | {"num_key_value_heads": None})


def test_export_folds_norm_scales_into_the_next_kernel(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    auto = pytest.importorskip("transformers", reason="transformers is not installed").AutoModelForCausalLM
    params, text = parameters(DIFFERENTIAL, np.zeros((1, 1), np.int32))["params"], tokens("diffllama")
    assert np.abs(params["block_0"]["attention"]["norm"]["scale"] - 1).max() > 0.1
    expected = DIFFERENTIAL.apply({"params": params}, text)
    params = {"params": stack_layers(params)}
    saved = save_hf(tmp_path / "diffllama", DIFFERENTIAL, params)
    theirs, report = auto.from_pretrained(saved, output_loading_info=True, attn_implementation="eager")
    assert theirs.config.model_type == "diffllama" and not any(report.values()), report
    state = to_hf(DIFFERENTIAL, params)
    assert all(torch.equal(state[name], x) for name, x in theirs.state_dict().items())
    again, its_params = from_hf(saved)
    assert again == DIFFERENTIAL
    assert np.all(its_params["params"]["block_0"]["attention"]["norm"]["scale"] == 1)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(text)).logits.numpy()
    for actual in (logits, again.apply(its_params, text)):  # float32, in another order of sums
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("value", [SoftCap(5.0), MaskFn(lambda b, h, i, j: j > 0)], ids=["score mod", "mask"])
def test_export_rejects_user_defined_kinds_by_name(value, tmp_path):
    kind = register(value, type(value).__name__)
    for layers in (kind, f"attention {kind} attention"):
        model = GPT.of(layers=layers, width=8, num_heads=2)
        message = f"model.layers = '{layers}': layers of {kind} cannot be exported to transformers: expected attention"
        with pytest.raises(UserError, match=message) as error:
            make_config(model)
        assert "\n" not in str(error.value)
        with pytest.raises(UserError, match=f"layers of {kind} cannot be exported"):
            save_hf(tmp_path / "folder", model, {"params": {}})


@pytest.mark.parametrize("layer, mask", [(0, SlidingWindow(left=6)), (1, Causal())], ids=["local", "global"])
def test_attention_equals_gpt_oss(layer, mask):
    """Its feed-forward layers are experts, so only attention is compared: sinks, windows, biases and YaRN."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss", reason="no gpt-oss in transformers")
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    yarn |= {"original_max_position_embeddings": 64, "rope_theta": 150_000.0}
    sizes = {"hidden_size": 40, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2, "sliding_window": 7}
    config = gpt_oss.GptOssConfig(**sizes, rope_parameters=yarn, attn_implementation="eager")
    torch.manual_seed(0)
    theirs = gpt_oss.GptOssAttention(config, layer).eval()
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.3)
        x = torch.randn(2, 50, 40)
        angles = gpt_oss.GptOssRotaryEmbedding(config)(x, torch.arange(50)[None])
        hidden = torch.where(torch.from_numpy(np.array(mask.dense(50, 50))), 0.0, -torch.inf)
        expected = theirs(x, angles, hidden[None, None])[0].numpy()
    state = {name: tensor.detach().numpy() for name, tensor in theirs.named_parameters()}
    params = {"sinks": state["sinks"]}
    for name, path, heads in (("q", "query", 6), ("k", "key", 2), ("v", "value", 2)):
        kernel, bias = state[f"{name}_proj.weight"].T, state[f"{name}_proj.bias"]
        params[path] = {"kernel": kernel.reshape(40, heads, 16), "bias": bias.reshape(heads, 16)}
    params["out"] = {"kernel": state["o_proj.weight"].T.reshape(6, 16, 40), "bias": state["o_proj.bias"]}
    rotary = Rotary(150_000.0, scaling="yarn", factor=32.0, original_context=64, truncate=False)
    ours = MultiHeadAttention(6, head_dim=16, kv_heads=2, mask=mask, rotary=rotary, sinks=True)
    # Results are of size 1; rotary angles, up to 50 radians, are rounded to 4e-6 by both.
    out = jax.jit(ours.apply)({"params": params}, x.numpy())
    np.testing.assert_allclose(out, expected, atol=2e-5)
