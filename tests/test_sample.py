"""Sampling: the distribution of tokens, reproducibility by seed, and texts longer than the context."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import sample, train
from attnlab.nn import GPT
from attnlab.sample import generate

PROMPT = np.array([1, 2, 3])


@functools.cache
def gpt(positions="learned", num_layers=2):
    model = GPT(vocab_size=11, num_layers=num_layers, num_heads=2, width=16, context=8, positions=positions)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return model, jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, params)  # for clear differences of the logits


def draw(*model_and_params, prompt=PROMPT, max_tokens=5, **options):
    """`[num_samples, max_tokens]`."""
    return np.stack(list(generate(*model_and_params, prompt, max_tokens, **options)), axis=1)


def most_likely(model, params, size):
    """Maps a text to its most likely next token by the full pass, where zeros after the text are masked (causal)."""
    apply = jax.jit(lambda tokens: model.apply(params, tokens)[0].argmax(axis=-1))

    def following(text):
        return int(apply(jnp.zeros((1, size), jnp.int32).at[0, : len(text)].set(np.array(text)))[len(text) - 1])

    return following


def test_greedy_text_equals_argmax_of_the_full_pass():
    model, params = gpt()
    text, following = list(PROMPT), most_likely(model, params, size=8)
    for _ in range(5):
        text.append(following(text))
    assert draw(model, params, temperature=0.0)[0].tolist() == text[3:]


def test_learned_positions_beyond_context_keep_the_last_half():
    model, params = gpt()
    text, window, following = list(PROMPT), 3, most_likely(model, params, size=8)
    for _ in range(20):
        if window > 8:
            window = 4
        text.append(following(text[-window:]))
        window += 1
    assert draw(model, params, max_tokens=20, temperature=0.0)[0].tolist() == text[3:]


@pytest.mark.parametrize("positions", ["rotary", "alibi", "none"])
def test_other_positions_beyond_context_roll(positions):
    """In one layer, rolling is attention to a window of the context's size."""
    model, params = gpt(positions, num_layers=1)
    windowed = model.clone(context=64, window=8)
    text, following = list(PROMPT), most_likely(windowed, params, size=23)
    for _ in range(20):
        text.append(following(text))
    assert draw(model, params, max_tokens=20, temperature=0.0)[0].tolist() == text[3:]


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("length", [1, 8, 30])
def test_prompt_of_any_length_is_accepted(positions, length):
    drawn = draw(*gpt(positions), prompt=np.arange(length) % 11, max_tokens=12)
    assert drawn.shape == (1, 12) and (drawn >= 0).all() and (drawn < 11).all()


def test_same_seed_gives_the_same_text_beside_others():
    model, params = gpt()
    one, three = draw(model, params, num_samples=1), draw(model, params, num_samples=3)
    np.testing.assert_array_equal(one, three[:1])
    assert len({tuple(row) for row in three}) > 1
    assert not np.array_equal(draw(model, params, seed=1), one)


def frequencies(logits, **options):
    """Relative frequencies of the tokens in 4,000 draws from the same logits."""
    uniform = (jnp.arange(4000) + 0.5) / 4000
    drawn = sample.Draw(**options)(jnp.tile(logits, (4000, 1)), uniform)
    return np.bincount(drawn, minlength=len(logits)) / 4000


PROBABILITIES = np.array([0.1, 0.5, 0.15, 0.25])


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, PROBABILITIES**2 / (PROBABILITIES**2).sum()),
        ({"top_k": 2}, np.array([0, 0.5, 0, 0.25]) / 0.75),
        ({"top_p": 0.7}, np.array([0, 0.5, 0, 0.25]) / 0.75),
        ({"top_p": 0.01}, np.array([0, 1, 0, 0])),
        ({"temperature": 0.0}, np.array([0, 1, 0, 0])),
        ({"temperature": 1e-40}, np.array([0, 1, 0, 0])),
        ({"top_p": 1e-50}, np.array([0, 1, 0, 0])),
        ({"top_k": 3, "top_p": 0.5}, np.array([0, 1, 0, 0])),
    ],
)
def test_draw_follows_the_expected_probabilities(options, expected):
    # 4,000 evenly spaced numbers give every frequency up to one draw, at either end of a token's interval.
    np.testing.assert_allclose(frequencies(jnp.log(PROBABILITIES), **options), expected, atol=0.04)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling")
    (folder / "text.txt").write_text("el perro persiguió al gato y lo atrapó. " * 100)
    tiny = ["steps=20", "model.num_layers=1", "model.width=16", "model.context=16", "batch_size=4", "eval.windows=4"]
    options = [f"--config.{option}" for option in [*tiny, f"data.path={folder}/text.txt", "log.tensorboard=False"]]
    assert train.main(["train", "--config=quickstart", f"--workdir={folder}/run", *options]) == 0
    return folder / "run"


def test_command_prints_the_prompt_and_a_continuation(workdir, capsys):
    capsys.readouterr()
    assert sample.main(["sample", f"--workdir={workdir}", "--prompt=el perro", "--max_tokens=40"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("el perro") and len(first) == len("el perro") + 40 + 1
    assert sample.main(["sample", f"--workdir={workdir}", "--prompt=el perro", "--max_tokens=40"]) == 0
    assert capsys.readouterr().out == first


def test_command_prints_several_texts(workdir, capsys):
    capsys.readouterr()
    options = ["--prompt=el ", "--max_tokens=10", "--num_samples=3", "--top_k=5", "--top_p=0.9", "--step=best"]
    assert sample.main(["sample", f"--workdir={workdir}", *options]) == 0
    texts = capsys.readouterr().out.split("-" * 80 + "\n")
    assert len(texts) == 3 and all(text.startswith("el ") and len(text.rstrip("\n")) <= 13 for text in texts)


def test_command_without_prompt_starts_with_the_first_token(workdir, capsys):
    """The corpus has no new line, which stands for an absent prompt elsewhere."""
    capsys.readouterr()
    assert sample.main(["sample", f"--workdir={workdir}", "--max_tokens=10"]) == 0
    assert len(capsys.readouterr().out.rstrip("\n")) == 10


def test_command_with_subwords_prints_unicode(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("el perro persiguió al gato y lo atrapó. 🐈\n" * 100)
    tiny = ["steps=2", "model.num_layers=1", "model.width=16", "model.context=16", "batch_size=4", "eval.windows=4"]
    tiny += ["data.tokenizer=bpe", "data.vocab_size=300", f"data.path={tmp_path}/text.txt", "log.tensorboard=False"]
    options = [f"--config.{option}" for option in tiny]
    assert train.main(["train", "--config=quickstart", f"--workdir={tmp_path}/run", *options]) == 0
    capsys.readouterr()
    options = ["--prompt=日本 🐈", "--max_tokens=9", "--num_samples=2"]
    assert sample.main(["sample", f"--workdir={tmp_path}/run", *options]) == 0
    texts = capsys.readouterr().out.split("-" * 80 + "\n")
    assert len(texts) == 2 and all(text.startswith("日本 🐈") for text in texts)
