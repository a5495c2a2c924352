"""Import and export of torch's attention, the notebook's classes and nanoGPT's checkpoints, to 1e-5."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.interop.torch import from_nanogpt, from_torch, to_nanogpt, to_torch
from attnlab.masks import Causal, Padding
from attnlab.nn import Block, MultiHeadAttention
from attnlab.support.errors import UserError
from tests.interop.huggingface_peers import gpt2

torch = pytest.importorskip("torch", reason="torch is not installed")


def drawn(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def unsettled(module):
    """Change biases and norms from their initial values."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval()


def assert_equal(ours, theirs):
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)


def assert_round_trip(module, theirs):
    """Assert that export is exact bit for bit, even after parameters change."""
    params = from_torch(theirs)[1]
    state = to_torch(params, theirs)
    assert state.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(state[name], tensor), name
    changed = jax.tree.map(lambda x: x + 1, params)
    theirs.load_state_dict(to_torch(changed, theirs))
    jax.tree.map(np.testing.assert_array_equal, from_torch(theirs)[1], changed)


@pytest.mark.parametrize("bias, memory", [(True, None), (False, 8), (True, 12)])
def test_multihead_attention_equals_torch(bias, memory):
    theirs = torch.nn.MultiheadAttention(8, num_heads=4, bias=bias, kdim=memory, vdim=memory, batch_first=True)
    module, params = from_torch(unsettled(theirs))
    assert isinstance(module, MultiHeadAttention) and module.use_bias == bias
    x, m = drawn(2, 5, 8), drawn(2, 7, memory or 8)
    lengths = np.array([3, 7])
    padding = torch.from_numpy(np.arange(7) >= lengths[:, None])
    expected = theirs(torch.from_numpy(x), torch.from_numpy(m), torch.from_numpy(m), key_padding_mask=padding)[0]
    assert_equal(module.apply(params, x, m, mask=Padding(jnp.array(lengths))), expected)
    assert_round_trip(module, theirs)


@pytest.mark.parametrize(
    "activation, norm_first, bias",
    [
        ("relu", True, True),
        ("gelu", False, False),
        (torch.nn.GELU(approximate="tanh"), False, True),
        (torch.nn.functional.silu, True, False),
    ],
)
def test_encoder_layer_equals_torch(activation, norm_first, bias):
    theirs = torch.nn.TransformerEncoderLayer(
        8, 2, 20, activation=activation, norm_first=norm_first, bias=bias, layer_norm_eps=1e-3, batch_first=True
    )
    module, params = from_torch(unsettled(theirs))
    assert isinstance(module, Block) and module.dropout_rate == module.attention.dropout_rate == 0.1
    x = drawn(2, 5, 8)
    assert_equal(module.apply(params, x), theirs(torch.from_numpy(x)))
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5)
    assert_equal(module.apply(params, x, mask=Causal()), theirs(torch.from_numpy(x), src_mask=causal))
    assert_round_trip(module, theirs)


def test_unsupported_torch_module_raises_by_name():
    attention, layer = torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer
    subclass = type("Bilinear", (attention,), {"forward": lambda self, x: x})
    other_epsilon, other_rate = layer(8, 2), layer(8, 2)
    other_epsilon.norm2.eps, other_rate.dropout2.p = 0.1, 0.3
    for source, message in (
        (attention(8, 2, add_bias_kv=True), "MultiheadAttention has bias_k"),
        (attention(8, 2, kdim=4, vdim=6), "kdim = 4 and vdim = 6"),
        (layer(8, 2, activation=torch.nn.Mish()), r"activation Mish\(\): .*relu, gelu or silu"),
        (torch.nn.Linear(2, 2), "convert a Linear: .*torch.nn.MultiheadAttention"),
        (torch.nn.utils.skip_init(attention, 8, 2, device="meta"), "is a meta tensor"),
        (subclass(8, 2), "Bilinear overrides forward"),
        (other_epsilon, "LayerNorms with one eps"),
        (other_rate, r"dropout rates \(0.1, 0.3\)"),
        (attention(8, 2).double(), "MultiheadAttention: in_proj_weight is float64"),
    ):
        with pytest.raises(UserError, match=message) as error:
            from_torch(source)
        assert "\n" not in str(error.value)


def test_to_torch_rejects_mismatched_parameters():
    theirs = torch.nn.MultiheadAttention(8, 2)
    params = from_torch(torch.nn.MultiheadAttention(8, 4))[1]
    with pytest.raises(UserError, match=r"key/bias has shape \(4, 2\).*\(2, 4\)"):
        to_torch(params, theirs)
    del params["params"]["key"]
    with pytest.raises(UserError, match=r"lack key/bias \(and 1 more\)"):
        to_torch(params, theirs)


GPT2 = {"vocab_size": 21, "num_layers": 2, "num_heads": 2, "width": 16, "context": 12}
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "vocab_size": 21, "dropout": 0.0, "bias": True}


def nanogpt(bias=True):
    """A transformers GPT-2, and its state dict in nanoGPT's form: the same names, with transposed kernels."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 12, "vocab_size": 21}
    config = transformers.GPT2Config(**sizes, activation_function="gelu", bos_token_id=0, eos_token_id=0)
    model = unsettled(transformers.GPT2LMHeadModel(config))
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(".bias") and not bias:
            tensor.zero_()
        else:
            state[name] = tensor.T if re.search("(c_attn|c_proj|c_fc).weight", name) else tensor
    return model, state


def save_checkpoint(path, state, prefix="", **sizes):
    """Save a checkpoint as nanoGPT's train.py does."""
    state = {prefix + name: tensor for name, tensor in state.items()}
    best = torch.tensor(1.5)
    saved = {"model": state, "optimizer": {"state": {}}, "model_args": SIZES | sizes, "iter_num": 7}
    torch.save(saved | {"best_val_loss": best, "config": {"device": "cpu"}}, path)


@pytest.mark.parametrize("bias, prefix", [(True, ""), (False, "_orig_mod.")])
def test_nanogpt_round_trip_equals_torch(bias, prefix, tmp_path):
    theirs, saved = nanogpt(bias)
    save_checkpoint(tmp_path / "ckpt.pt", saved, prefix, bias=bias, dropout=0.2)
    model, params = from_nanogpt(tmp_path / "ckpt.pt")
    assert model == gpt2(**GPT2, dropout=0.2, use_bias=bias, activation="gelu")
    tokens = np.random.default_rng(0).integers(0, 21, (2, 12))
    assert_equal(model.apply(params, tokens), theirs(torch.from_numpy(tokens)).logits)
    state = to_nanogpt(model, params)
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())


def test_invalid_nanogpt_checkpoint_raises_one_line(tmp_path):
    path = tmp_path / "ckpt.pt"
    with pytest.raises(UserError, match="ckpt.pt: no such file"):
        from_nanogpt(path)
    state = nanogpt()[1]
    for sizes, more, message in (
        ({}, {"transformer.h.2.ln_1.weight": torch.ones(16)}, "holds .*transformer.h.2.ln_1.weight"),
        ({}, {"transformer.wpe.weight": torch.ones(12, 17)}, r"wpe.weight has shape \(12, 17\)"),
        ({}, {"lm_head.weight": torch.ones(21, 16)}, "lm_head.weight differs"),
        ({"bias": 0}, {}, "model_args.bias = 0"),
        ({"n_head": 3}, {}, "ckpt.pt: .*width = 16: .*num_heads = 3"),
        ({"dropout": 2.0}, {}, "attn_pdrop = 2.0"),
    ):
        save_checkpoint(path, state | more, **sizes)
        with pytest.raises(UserError, match=message):
            from_nanogpt(path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"nonsense"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="complete checkpoint of tensors") as error:
            from_nanogpt(path)
        assert "\n" not in str(error.value)
    torch.save({"state": {}}, path)
    with pytest.raises(UserError, match="has no 'model' and 'model_args'"):
        from_nanogpt(path)
    model = gpt2(**GPT2)
    with pytest.raises(UserError, match="model.activation = 'gelu_tanh': nanoGPT .*'gelu'"):
        to_nanogpt(model, model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
