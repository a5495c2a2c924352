"""Families with recurrent layers: padding, packing, decoding, gradients, shardings and the names in their files."""

import functools
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import attnlab
from attnlab import sample
from attnlab.data import tokenizers
from attnlab.interop.huggingface import from_hf, make_config, make_model, save_hf
from attnlab.nn import GPT, Recurrence, Rotary, stack_layers
from attnlab.support.errors import UserError
from attnlab.training import parallel
from tests.interop.huggingface_peers import RECURRENT, goldens, greedy, logits, peer, tokens, weights
from tests.interop.test_huggingface_finetuning import finetune
from tests.parameters import parameters
from tests.texts import TEXT

FAMILIES = ("qwen3_next", "olmo_hybrid", "mamba2", "bamba")
EACH = [name if name in ("qwen3_next", "bamba") else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
CUT = 23  # tokens of a sequence before padding, or of the first document


@functools.cache
def ours(name):
    """Model, parameters, and a compiled call."""
    kept = goldens(name)
    model, params = from_hf(weights(json.loads(str(kept["shapes"]))), json.loads(str(kept["config"])))
    return model, params, jax.jit(model.apply)


def assert_close(found, expected):
    """To 1e-5 of the largest logit: float32, in another order of sums."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", EACH)
def test_logits_are_within_1e_5_of_transformers(name):
    peer(name)
    _, params, apply = ours(name)
    assert_close(apply(params, tokens(name)), logits(name))


@pytest.mark.parametrize("name", EACH)
def test_padding_equals_transformers_with_a_mask(name):
    """Theirs is at the left: at the right their logits are the same, but their states are not."""
    torch, theirs = peer(name)
    _, params, apply = ours(name)
    text, size = tokens(name), tokens(name).shape[1]
    left = np.stack([np.concatenate([np.full(size - CUT, 5), text[0, :CUT]]), text[1]])
    right = np.stack([np.concatenate([text[0, :CUT], np.full(size - CUT, 5)]), text[1]])
    mask = (np.arange(size) >= [[size - CUT], [0]]).astype(np.int64)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(left), attention_mask=torch.from_numpy(mask)).logits.numpy()
    found = apply(params, right, lengths=np.array([CUT, size], np.int32))
    assert_close(found[1], expected[1])
    assert_close(found[0, :CUT], expected[0, size - CUT :])


@pytest.mark.parametrize("name", EACH)
def test_packed_documents_have_the_logits_that_transformers_gives_each(name):
    """Packed, theirs let states pass from a document to the next, or raise, where fla and mamba_ssm are missing."""
    torch, theirs = peer(name)
    _, params, apply = ours(name)
    text = tokens(name)
    with torch.no_grad():
        alone = [theirs(torch.from_numpy(part)).logits.numpy() for part in (text[:, :CUT], text[:, CUT:])]
    segments = np.broadcast_to(np.arange(text.shape[1]) >= CUT, text.shape).astype(np.int32)
    assert_close(apply(params, text, segments=segments), np.concatenate(alone, axis=1))


@pytest.mark.parametrize("name", EACH)
def test_token_by_token_equals_one_pass_here_and_there(name):
    torch, theirs = peer(name)
    model, params, apply = ours(name)
    text, cache = tokens(name)[:, :CUT], "cache_params" if name == "mamba2" else "past_key_values"
    caches, found, state, expected = model.empty_caches(len(text), CUT), [], None, []
    for t in range(CUT):
        out, caches = apply(params, text[:, t : t + 1], caches=caches)
        found.append(out)
        # Without positions Bamba would count each token as the first.
        place = {} if name == "mamba2" else {"position_ids": torch.full((len(text), 1), t)}
        with torch.no_grad():
            answer = theirs(torch.from_numpy(text[:, t : t + 1]), use_cache=True, **{cache: state}, **place)
        state = getattr(answer, cache)
        expected.append(answer.logits.numpy())
    assert_close(np.concatenate(found, axis=1), logits(name)[:, :CUT])
    assert_close(np.concatenate(expected, axis=1), logits(name)[:, :CUT])


@pytest.mark.parametrize("name", EACH)
def test_gradients_are_finite_and_reach_every_parameter(name):
    model, params, _ = ours(name)
    text = tokens(name)

    def loss(params):
        return model.apply(params, text[:, :-1], targets=text[:, 1:]).mean()

    before, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(gradients))
    size = 0.1 / np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradients)))
    after = jax.jit(loss)(jax.tree.map(lambda x, g: x - size * g, params, gradients))
    assert after < before


# Grouped projections, convolutions, vectors; a layer more than whole periods. All sizes are even.
HYBRID = GPT(
    vocab_size=66,
    num_layers=5,
    num_heads=4,
    width=24,
    context=32,
    kv_heads=2,
    head_dim=8,
    positions="rotary",
    rotary=Rotary(fraction=0.5),
    norm="rms_plus_one",
    mlp="gated",
    activation="silu",
    use_bias=False,
    qk_norm=True,
    output_gate=True,
    pattern="gated_delta attention",
    recurrence=Recurrence(heads=2, key_dim=6, value_heads=4, value_dim=10),
    tie_embeddings=False,
)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A folder, and its parameters."""
    params = parameters(HYBRID, np.zeros((1, 1), np.int32))
    return save_hf(tmp_path_factory.mktemp("hub") / "hybrid", HYBRID, params, max_shard_bytes=20_000), params


def test_hybrid_is_read_onto_shardings_of_any_axis(hybrid):
    folder, expected = hybrid
    assert len(list(folder.glob("*.safetensors"))) > 1
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))

    def split(x, axis):
        axis = min(axis, x.ndim - 1)
        return NamedSharding(devices, PartitionSpec(*("x" if n == axis else None for n in range(x.ndim))))

    for axis in range(3):
        found = from_hf(folder, shardings=lambda shapes, n=axis: jax.tree.map(lambda x: split(x, n), shapes))[1]
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_stacked_hybrid_is_read_and_saved_as_it_is(hybrid, tmp_path):
    folder, params = hybrid
    stacked = stack_layers(params["params"])
    assert {"blocks_0", "blocks_1", "block_4"} <= stacked.keys()
    found = from_hf(folder, shardings=parallel.make("mesh", fsdp=2).shardings(stacked))[1]["params"]
    jax.tree.map(np.testing.assert_array_equal, found, stacked)
    again = save_hf(tmp_path / "again", HYBRID, {"params": stacked}, max_shard_bytes=20_000)
    for file in folder.glob("*.safetensors"):
        assert (again / file.name).read_bytes() == file.read_bytes()


def renamed(folder, names, splits):
    """Rename the tensors of a file, and split some along their first axis."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = {}
    for name, at in json.loads(content[8 : 8 + length]).items():
        parts = splits.get(".".join(name.split(".")[-2:])) if name != "__metadata__" else None
        for old, new in names.items():
            name = name.replace(old, new)
        if parts is None:
            header[name] = at
            continue
        start, row = at["data_offsets"][0], (at["data_offsets"][1] - at["data_offsets"][0]) // at["shape"][0]
        for part, rows in parts.items():
            place = {"shape": [rows, *at["shape"][1:]], "data_offsets": [start, start + rows * row]}
            header[name.replace("conv1d", part)] = at | place
            start += rows * row
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])


@pytest.mark.parametrize("sizes", [(12, 12, 20), (15, 15, 14)], ids=["published", "of transformers 5"])
def test_files_of_olmo_hybrid_have_a_convolution_in_three_tensors(sizes, tmp_path):
    """transformers 5 splits it into equal parts when it saves, whatever the sizes of keys and values."""
    model, params, _ = ours("olmo_hybrid")
    folder = save_hf(tmp_path / "olmo", model, params, model_type="olmo_hybrid")
    names = {"0.input_layernorm": "0.attention_layer_norm"}
    names |= {f"{n}.post_attention_layernorm": f"{n}.feedforward_layer_norm" for n in range(2)}
    renamed(folder, names, {"conv1d.weight": dict(zip(("q_conv1d", "k_conv1d", "v_conv1d"), sizes))})
    found = from_hf(folder)
    assert found[0] == model
    jax.tree.map(np.testing.assert_array_equal, found[1], params)


def test_old_files_of_mamba2_name_the_embedding_in_the_singular(tmp_path):
    model, params, _ = ours("mamba2")
    folder = save_hf(tmp_path / "mamba2", model, params)
    renamed(folder, {"backbone.embeddings.": "backbone.embedding."}, {})
    jax.tree.map(np.testing.assert_array_equal, from_hf(folder)[1], params)


def test_tensors_of_heads_for_later_tokens_are_named(tmp_path):
    kept = goldens("qwen3_next")
    state = weights(json.loads(str(kept["shapes"]))) | {"mtp.norm.weight": np.ones(48, np.float32)}
    with pytest.raises(UserError, match="holds the tensor mtp.norm.weight, which the model does not have"):
        from_hf(state, json.loads(str(kept["config"])))


def tuned(name, **fields):
    """A small model of a family, by what differs from a Llama."""
    sizes = {"vocab_size": 303, "num_layers": 3, "num_heads": 4, "width": 32, "context": 64, "mlp_ratio": 2.5}
    common = {"norm": "rms", "mlp": "gated", "activation": "silu", "use_bias": False, "tie_embeddings": False}
    return pytest.param(name, GPT(**sizes | common | fields), id=name)


DELTA = {"pattern": "gated_delta gated_delta attention", "qk_norm": True}
MODELS = [
    tuned(
        "qwen3_next",
        **DELTA,
        positions="rotary",
        rotary=Rotary(fraction=0.25),
        norm="rms_plus_one",
        output_gate=True,
    ),
    tuned("olmo_hybrid", **DELTA, positions="none", norm_at="hybrid", qk_norm_joint=True),
    tuned("mamba2", mixer="mamba2", mlp_ratio=0, mlp="plain", activation="gelu_tanh", positions="none"),
    tuned("bamba", pattern="mamba2 attention mamba2", positions="rotary", rotary=Rotary(fraction=0.5)),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, model", MODELS)
def test_finetuned_hybrid_writes_the_same_text_in_transformers(name, model, text, tmp_path, capsys):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer = tokenizers.make("bpe", TEXT, vocab_size=300)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    source = save_hf(tmp_path / "source", model, params, tokenizer)
    assert finetune(source, text, tmp_path / "run", steps=20) == 0, capsys.readouterr().err
    found, params, tokenizer, _ = attnlab.load(tmp_path / "run")
    assert found == from_hf(source)[0].over_tokens(tokenizer.vocab_size).clone(context=32)
    folder = save_hf(tmp_path / "tuned", found, params, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert theirs.config.model_type == name
    prompt = tokenizer.encode("En un lugar")
    drawn = sample.generate(found, params, prompt, 24, temperature=0.0)
    np.testing.assert_array_equal(np.concatenate(list(drawn)), greedy(torch, theirs, prompt[None], 24))


LAYERS = [
    ("qwen3_next", {"full_attention_interval": 4}, "gated_delta gated_delta gated_delta attention"),
    ("qwen3_next", {"full_attention_interval": 1}, "attention"),
    ("qwen3_next", {"layer_types": [RECURRENT] * 6}, "gated_delta"),
    ("olmo_hybrid", {}, "gated_delta gated_delta gated_delta attention"),
    ("olmo_hybrid", {"num_hidden_layers": 3}, "gated_delta gated_delta attention"),
    ("bamba", {"attn_layer_indices": [2, 77]}, "mamba2 mamba2 attention mamba2"),
    ("bamba", {"attn_layer_indices": None}, "mamba2"),
    ("bamba", {"attn_layer_indices": list(range(6))}, "attention"),
    ("mamba2", {}, "mamba2"),
]


@pytest.mark.parametrize("name, options, pattern", LAYERS, ids=str)
def test_layers_of_attention_are_where_the_options_of_the_family_say(name, options, pattern):
    kept = json.loads(str(goldens(name)["config"])) | {"num_hidden_layers": 6, "layer_types": None}
    model = make_model(kept | options)
    assert (model.pattern or model.mixer) == pattern
    assert model == make_model(make_config(model, name))
