"""Families with relatives of softmax attention: padding, packing, decoding, gradients, the order of their tensors."""

import json
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import attnlab
from attnlab import sample
from attnlab.data import tokenizers
from attnlab.interop.huggingface import from_hf, make_config, save_hf, to_hf
from attnlab.nn import GPT, KVCache, LatentCache, own, stack_layers
from attnlab.ops.masks import Causal, Dense
from attnlab.ops.score_mods import SoftCap
from attnlab.support.errors import UserError
from attnlab.training import parallel
from tests.interop.huggingface_peers import PEERS, goldens, greedy, logits, peer, tokens, weights
from tests.interop.test_huggingface_finetuning import finetune
from tests.interop.test_huggingface_recurrent import CUT, assert_close, ours
from tests.nn import user_parts
from tests.parameters import parameters
from tests.texts import TEXT

NAMES = [name for name in PEERS if name.startswith(("diffllama", "deepseek_v3"))]
EACH = [pytest.param(name, marks=pytest.mark.slow) if "-" in name else name for name in NAMES]
CACHES = {"diffllama": KVCache, "deepseek_v3": LatentCache}


@pytest.mark.parametrize("name", EACH)
def test_logits_are_within_1e_5_of_transformers(name):
    peer(name)
    _, params, apply = ours(name)
    assert_close(apply(params, tokens(name)), logits(name))


@pytest.mark.parametrize("name", EACH)
def test_padding_equals_transformers_with_a_mask(name):
    torch, theirs = peer(name)
    _, params, apply = ours(name)
    text, lengths = tokens(name), np.array([CUT, 40], np.int32)
    mask = (np.arange(text.shape[1]) < lengths[:, None]).astype(np.int64)
    with torch.no_grad():
        right = theirs(torch.from_numpy(text), attention_mask=torch.from_numpy(mask)).logits.numpy()
        rolled = np.roll(text[:1], 40 - CUT, axis=1)
        left = theirs(torch.from_numpy(rolled), attention_mask=torch.from_numpy(mask[:1, ::-1].copy())).logits.numpy()
    found = apply(params, text, lengths=lengths)
    assert_close(found[1], right[1])
    assert_close(found[0, :CUT], right[0, :CUT])
    assert_close(found[0, :CUT], left[0, -CUT:])


@pytest.mark.parametrize("name", EACH)
def test_packed_documents_have_the_logits_that_transformers_gives_each(name):
    torch, theirs = peer(name)
    _, params, apply = ours(name)
    text = tokens(name)
    with torch.no_grad():
        alone = [theirs(torch.from_numpy(part)).logits.numpy() for part in (text[:, :CUT], text[:, CUT:])]
    segments = np.broadcast_to(np.arange(text.shape[1]) >= CUT, text.shape).astype(np.int32)
    assert_close(apply(params, text, segments=segments), np.concatenate(alone, axis=1))


@pytest.mark.parametrize("first", [1, 18])
@pytest.mark.parametrize("name", EACH)
def test_decoding_equals_one_pass_here_and_there(name, first):
    """A long first step expands a cache of latents, and single tokens do not."""
    torch, theirs = peer(name)
    model, params, apply = ours(name)
    text, state, found, expected = tokens(name)[:, :CUT], None, [], []
    caches = model.empty_caches(len(text), CUT)
    assert all(isinstance(cache, CACHES[name.partition("-")[0]]) for cache in caches)
    for start, end in [(0, first), *((t, t + 1) for t in range(first, CUT))]:
        out, caches = apply(params, text[:, start:end], caches=caches)
        found.append(out)
        with torch.no_grad():
            answer = theirs(torch.from_numpy(text[:, start:end]), use_cache=True, past_key_values=state)
        state = answer.past_key_values
        expected.append(answer.logits.numpy())
    assert_close(np.concatenate(found, axis=1), logits(name)[:, :CUT])
    assert_close(np.concatenate(expected, axis=1), logits(name)[:, :CUT])
    assert_close(np.concatenate(found, axis=1), apply(params, text))


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


def kept(name):
    """The state dict and the config of a kept model."""
    answers = goldens(name)
    return weights(json.loads(str(answers["shapes"]))), json.loads(str(answers["config"]))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_read_onto_shardings_of_any_axis(name):
    _, expected, _ = ours(name)
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))

    def split(x, axis):
        even = [n for n in range(x.ndim) if x.shape[n] % 2 == 0]
        axis = even[axis % len(even)] if even else None
        return NamedSharding(devices, PartitionSpec(*("x" if n == axis else None for n in range(x.ndim))))

    for axis in range(3):
        found = from_hf(*kept(name), shardings=lambda shapes, n=axis: jax.tree.map(lambda x: split(x, n), shapes))[1]
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", ["diffllama", "deepseek_v3"])
def test_stacked_layers_are_read_as_they_are(name):
    _, params, _ = ours(name)
    stacked = stack_layers(params["params"])
    found = from_hf(*kept(name), shardings=parallel.make("mesh", fsdp=1).shardings(stacked))[1]["params"]
    jax.tree.map(np.testing.assert_array_equal, found, stacked)


@pytest.mark.parametrize("name", ["diffllama-2", "deepseek_v3"])
def test_file_is_read_in_pieces(name, monkeypatch, tmp_path):
    """Pieces of three rows, whose order is that of the parameters."""
    from safetensors import numpy

    state, config = kept(name)
    numpy.save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("attnlab.interop.tensors._CHUNK", 4 * 3 * 48)
    jax.tree.map(np.testing.assert_array_equal, from_hf(tmp_path)[1], ours(name)[1])


def test_interleaved_pairs_become_halves_by_rope_interleave_alone():
    state, config = kept("deepseek_v3")
    pairs, halves = (from_hf(state, config | {"rope_interleave": flag}) for flag in (True, False))
    assert pairs[0] == halves[0]
    of_pairs, of_halves = (params["params"]["block_1"]["attention"] for _, params in (pairs, halves))
    for name in ("query", "rotary"):
        one, other = (x[name]["kernel"][..., -6:] for x in (of_pairs, of_halves))
        np.testing.assert_array_equal(one, other[..., [0, 2, 4, 1, 3, 5]])
    unchanged = {"latent", "key", "value", "out", "query_down", "query_norm", "latent_norm"}
    for name in unchanged:
        jax.tree.map(np.testing.assert_array_equal, of_pairs[name], of_halves[name])


def test_heads_for_later_tokens_are_left_out_of_a_deepseek():
    state, config = kept("deepseek_v3")
    assert config["num_nextn_predict_layers"] == 1
    extra = {f"model.layers.2.{part}.weight": np.ones((3, 4), np.float32) for part in ("eh_proj", "shared_head.head")}
    jax.tree.map(np.testing.assert_array_equal, from_hf(state | extra, config)[1], ours("deepseek_v3")[1])
    for rest in ({"model.layers.2.mlp.up_proj.weight": state["lm_head.weight"]}, {"model.layers.1.eh_proj.weight": 1}):
        with pytest.raises(UserError, match=f"holds the tensor {next(iter(rest))}, which the model does not have"):
            from_hf(state | rest, config)


def test_weights_of_the_norm_that_transformers_has_not_are_named():
    state, config = kept("diffllama")
    name = "model.layers.0.self_attn.groupnorm.weight"
    with pytest.raises(UserError, match=f"holds the tensor {name}, which the model does not have"):
        from_hf(state | {name: np.ones(16, np.float32)}, config)


DIFFERENTIAL = GPT(
    vocab_size=303,
    num_layers=3,
    num_heads=6,  # whose pairs of value heads are no exchange: here and there they have different orders
    width=32,
    context=64,
    head_dim=6,
    mixer="differential",
    positions="rotary",
    norm="rms",
    mlp="gated",
    mlp_ratio=2.5,
    activation="silu",
    use_bias=False,
    tie_embeddings=False,
)


def trained(model):
    """Parameters whose scales of heads' norms are not 1."""
    params = parameters(model, np.zeros((1, 1), np.int32))["params"]
    scales = [params[f"block_{n}"]["attention"]["norm"]["scale"] for n in range(model.num_layers)]
    assert all(np.abs(scale - 1).max() > 0.1 for scale in scales)
    return params


@pytest.mark.parametrize("layers", ["one by one", "stacked"])
def test_scales_of_norms_go_out_within_the_next_kernel(layers, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    auto = pytest.importorskip("transformers", reason="transformers is not installed").AutoModelForCausalLM
    params, text = trained(DIFFERENTIAL), tokens("diffllama")
    expected = DIFFERENTIAL.apply({"params": params}, text)
    params = {"params": stack_layers(params) if layers == "stacked" else params}
    saved = save_hf(tmp_path / "diffllama", DIFFERENTIAL, params)
    theirs, report = auto.from_pretrained(saved, output_loading_info=True, attn_implementation="eager")
    assert theirs.config.model_type == "diffllama" and not any(report.values()), report
    state = to_hf(DIFFERENTIAL, params)
    assert all(torch.equal(state[name], x) for name, x in theirs.state_dict().items())
    with torch.no_grad():
        assert_close(theirs(torch.from_numpy(text)).logits.numpy(), expected)
    again, its_params = from_hf(saved)
    assert again == DIFFERENTIAL
    assert_close(again.apply(its_params, text), expected)
    assert np.all(its_params["params"]["block_0"]["attention"]["norm"]["scale"] == 1)


LATENT = DIFFERENTIAL.clone(mixer="latent", head_dim=None)
REFUSED = {
    "latent": (LATENT, None, "model.mixer = 'latent': deepseek_v3 is read, but not written"),
    "latent in a pattern": (
        LATENT.clone(mixer="attention", pattern="attention latent"),
        None,
        "model.pattern = 'attention latent': deepseek_v3 is read, but not written",
    ),
    "family that is read": (DIFFERENTIAL, "deepseek_v3", "model_type = 'deepseek_v3' is read, but not written: "),
    "stick-breaking": (
        DIFFERENTIAL.clone(mixer="stick_breaking", positions="none"),
        None,
        "model.mixer = 'stick_breaking': the supported models of transformers have no layers of stick_breaking",
    ),
    "forget": (DIFFERENTIAL.clone(mixer="forget", positions="none"), None, "model.mixer = 'forget': "),
    "mixer of another family": (DIFFERENTIAL, "mistral", "model.mixer = 'differential': mistral .* 'attention'"),
    "softmax in DiffLlama": (
        DIFFERENTIAL.clone(mixer="attention"),
        "diffllama",
        "model.mixer = 'attention': diffllama supports only 'differential'",
    ),
    "both": (
        DIFFERENTIAL.clone(mixer="attention", pattern="differential attention"),
        "diffllama",
        "model.pattern = 'differential attention': diffllama supports only 'differential'",
    ),
    "window": (DIFFERENTIAL.clone(window=5), None, "model.window = 5: diffllama supports only None"),
    "norms of queries": (DIFFERENTIAL.clone(qk_norm=True), None, "model.qk_norm = True: diffllama"),
    "scale": (DIFFERENTIAL.clone(score_scale=1.0), None, "model.score_scale = 1.0: diffllama"),
    "cap": (DIFFERENTIAL.clone(soft_cap=5.0), None, "model.soft_cap = 5.0: diffllama"),
    "score mod": (DIFFERENTIAL.clone(score_mod=SoftCap(5.0)), None, r"model.score_mod = SoftCap\(.*: diffllama .*None"),
    "score mods": (
        DIFFERENTIAL.clone(mixer="attention", score_mod=(SoftCap(5.0), SoftCap(9.0))),
        None,
        r"model.score_mod = \(SoftCap\(.*\)\): .* supports only None",
    ),
    "mask": (DIFFERENTIAL.clone(mask=Causal()), None, r"model.mask = Causal\(\): diffllama supports only None"),
    "array": (
        DIFFERENTIAL.clone(mask=Dense(np.tri(64, dtype=bool))),
        None,
        "model.mask = Dense.*: diffllama supports only None",
    ),
}


@pytest.mark.parametrize("model, family, message", REFUSED.values(), ids=REFUSED)
def test_export_rejects_what_no_family_holds(model, family, message):
    with pytest.raises(UserError, match=message) as error:
        make_config(model, family)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("part", ["near", "odd", "Average", "Shifted", "unregistered"])
def test_export_rejects_parts_of_a_user_by_their_name(part, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(user_parts.SOURCE)
    word = f"{file}:{part}" if part == "unregistered" else own.register(f"{file}:{part}")
    for model in (
        DIFFERENTIAL.clone(mixer=word),
        DIFFERENTIAL.clone(mixer="attention", pattern=f"attention {word} attention"),
    ):
        with pytest.raises(UserError, match=f"model.* = '.*mine.py:{part}.*no layers of .*mine.py:{part}$") as error:
            make_config(model)
        assert "\n" not in str(error.value)
        with pytest.raises(UserError, match=f"mine.py:{part}"):
            save_hf(tmp_path / "folder", model, {"params": {}})


@pytest.mark.slow
def test_finetuned_diffllama_writes_the_same_text_in_transformers(text, tmp_path, capsys):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    auto = pytest.importorskip("transformers", reason="transformers is not installed").AutoModelForCausalLM
    tokenizer = tokenizers.make("bpe", TEXT, vocab_size=300)
    source = save_hf(tmp_path / "source", DIFFERENTIAL, {"params": trained(DIFFERENTIAL)}, tokenizer)
    assert finetune(source, text, tmp_path / "run", steps=20) == 0, capsys.readouterr().err
    model, params, tokenizer, _ = attnlab.load(tmp_path / "run")
    assert model == DIFFERENTIAL.over_tokens(tokenizer.vocab_size).clone(context=32)
    folder = save_hf(tmp_path / "tuned", model, params, tokenizer)
    theirs = auto.from_pretrained(folder).eval()
    prompt = tokenizer.encode("En un lugar")
    drawn = sample.generate(model, params, prompt, 24, temperature=0.0)
    np.testing.assert_array_equal(np.concatenate(list(drawn)), greedy(torch, theirs, prompt[None], 24))


@pytest.mark.slow
def test_deepseek_of_transformers_is_trained_and_writes(text, tmp_path, capsys):
    peer("deepseek_v3")
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizers.make("bpe", TEXT, vocab_size=300)
    config = transformers.DeepseekV3Config(**kept("deepseek_v3")[1] | {"vocab_size": tokenizer.vocab_size})
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path / "source")
    llama = DIFFERENTIAL.clone(mixer="attention")
    other = save_hf(tmp_path / "llama", llama, parameters(llama, np.zeros((1, 1), np.int32)), tokenizer)
    for file in other.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "source")
    assert finetune(tmp_path / "source", text, tmp_path / "run", steps=60) == 0, capsys.readouterr().err
    model, params, tokenizer, config = attnlab.load(tmp_path / "run")
    source = from_hf(tmp_path / "source")
    assert model == source[0].clone(context=32) and config.model.latent.kv_rank == 12 and model.score_scale
    ids = tokenizer.encode(TEXT)[None, :33]
    losses = [model.apply(each, ids[:, :-1], targets=ids[:, 1:]).mean() for each in (source[1], params)]
    assert losses[1] < losses[0] - 1
    drawn = np.concatenate(list(sample.generate(model, params, tokenizer.encode("En un lugar"), 24, temperature=0.0)))
    assert tokenizer.decode(drawn).startswith(" de la")
