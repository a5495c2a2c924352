"""The attention of gpt-oss, whose feed-forward layers are a mixture of experts: sinks, windows, biases and YaRN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.masks import Causal, SlidingWindow
from attnlab.nn import MultiHeadAttention, Rotary


@pytest.mark.parametrize("layer, mask", [(0, SlidingWindow(left=6)), (1, Causal())], ids=["local", "global"])
def test_attention_equals_that_of_gpt_oss(layer, mask):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss", reason="no gpt-oss in transformers")
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    config = gpt_oss.GptOssConfig(
        hidden_size=40,
        head_dim=16,
        num_attention_heads=6,
        num_key_value_heads=2,
        sliding_window=7,
        rope_parameters=yarn | {"original_max_position_embeddings": 64, "rope_theta": 150_000.0},
        attn_implementation="eager",
    )
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
    # Results are of size 1; rotary angles, up to 50 radians, are rounded to 4e-6 by either.
    out = jax.jit(ours.apply)({"params": params}, jnp.asarray(x.numpy()))
    np.testing.assert_allclose(out, expected, atol=2e-5)
