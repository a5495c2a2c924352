"""Sampling: the right distribution, the same text for the same seed, and no end at the context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import sample, train
from attnlab.nn import GPT
from attnlab.sample import generate

PROMPT = np.array([1, 2, 3])


def gpt(positions="learned"):
    model = GPT(vocab_size=11, num_layers=2, num_heads=2, width=16, context=8, positions=positions)
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return model, jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, params)  # so that its mind is made up


def draw(*model_and_params, prompt=PROMPT, max_tokens=5, **options):
    """`[num_samples, max_tokens]`."""
    return np.stack(list(generate(*model_and_params, prompt, max_tokens, **options)), axis=1)


def likeliest(model, params, size):
    """Text to its likeliest next token, by the full pass; causal, so that zeros after the text are not seen."""
    apply = jax.jit(lambda tokens: model.apply(params, tokens)[0].argmax(axis=-1))

    def following(text):
        return int(apply(jnp.zeros((1, size), jnp.int32).at[0, : len(text)].set(np.array(text)))[len(text) - 1])

    return following


def test_greedy_text_is_the_likeliest_token_of_the_full_pass():
    model, params = gpt()
    text, following = list(PROMPT), likeliest(model, params, size=8)
    for _ in range(5):
        text.append(following(text))
    assert draw(model, params, temperature=0.0)[0].tolist() == text[3:]


def test_past_the_context_learned_positions_keep_the_last_half():
    model, params = gpt()
    text, window, following = list(PROMPT), 3, likeliest(model, params, size=8)
    for _ in range(20):
        if window > 8:
            window = 4
        text.append(following(text[-window:]))
        window += 1
    assert draw(model, params, max_tokens=20, temperature=0.0)[0].tolist() == text[3:]


@pytest.mark.parametrize("positions", ["rotary", "alibi", "none"])
def test_past_the_context_other_positions_roll(positions):
    """In one layer, rolling is attention to a window of the context's size."""
    options = {"vocab_size": 11, "num_layers": 1, "num_heads": 2, "width": 16, "positions": positions}
    model = GPT(context=8, **options)
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    params = jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, params)
    windowed = GPT(context=64, window=8, **options)
    text, following = list(PROMPT), likeliest(windowed, params, size=23)
    for _ in range(20):
        text.append(following(text))
    assert draw(model, params, max_tokens=20, temperature=0.0)[0].tolist() == text[3:]


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("length", [1, 8, 30])
def test_prompts_of_any_length_are_read(positions, length):
    drawn = draw(*gpt(positions), prompt=np.arange(length) % 11, max_tokens=12)
    assert drawn.shape == (1, 12) and (drawn >= 0).all() and (drawn < 11).all()


def test_the_same_seed_gives_the_same_text_beside_any_others():
    model, params = gpt()
    one, three = draw(model, params, num_samples=1), draw(model, params, num_samples=3)
    np.testing.assert_array_equal(one, three[:1])
    assert len({tuple(row) for row in three}) > 1
    assert not np.array_equal(draw(model, params, seed=1), one)


def frequencies(logits, **options):
    """How often each token is drawn from the same logits, 4,000 times."""
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
def test_tokens_are_drawn_with_their_probability(options, expected):
    # Evenly spaced, 4,000 numbers give every frequency to one of them, at either end of a token's share.
    np.testing.assert_allclose(frequencies(jnp.log(PROBABILITIES), **options), expected, atol=0.04)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling")
    (folder / "text.txt").write_text("el perro persiguió al gato y lo atrapó. " * 100)
    tiny = ["steps=20", "model.num_layers=1", "model.width=16", "model.context=16", "batch_size=4", "eval.windows=4"]
    options = [f"--config.{option}" for option in [*tiny, f"data.path={folder}/text.txt", "log.tensorboard=False"]]
    assert train.main(["train", "--config=configs/quickstart.py", f"--workdir={folder}/run", *options]) == 0
    return folder / "run"


def test_the_command_writes_the_prompt_and_what_follows(workdir, capsys):
    capsys.readouterr()
    assert sample.main(["sample", f"--workdir={workdir}", "--prompt=el perro", "--max_tokens=40"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("el perro") and len(first) == len("el perro") + 40 + 1
    assert sample.main(["sample", f"--workdir={workdir}", "--prompt=el perro", "--max_tokens=40"]) == 0
    assert capsys.readouterr().out == first


def test_the_command_writes_several_texts(workdir, capsys):
    capsys.readouterr()
    options = ["--prompt=el ", "--max_tokens=10", "--num_samples=3", "--top_k=5", "--top_p=0.9", "--step=best"]
    assert sample.main(["sample", f"--workdir={workdir}", *options]) == 0
    texts = capsys.readouterr().out.split("-" * 80 + "\n")
    assert len(texts) == 3 and all(text.startswith("el ") and len(text.rstrip("\n")) <= 13 for text in texts)


def test_without_a_prompt_it_starts_on_its_own(workdir, capsys):
    """The corpus has no line break, which is what an absent prompt would be."""
    capsys.readouterr()
    assert sample.main(["sample", f"--workdir={workdir}", "--max_tokens=10"]) == 0
    assert len(capsys.readouterr().out.rstrip("\n")) == 10


def test_the_command_writes_with_subwords(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("el perro persiguió al gato y lo atrapó. 🐈\n" * 100)
    tiny = ["steps=2", "model.num_layers=1", "model.width=16", "model.context=16", "batch_size=4", "eval.windows=4"]
    tiny += ["data.tokenizer=bpe", "data.vocab_size=300", f"data.path={tmp_path}/text.txt", "log.tensorboard=False"]
    options = [f"--config.{option}" for option in tiny]
    assert train.main(["train", "--config=configs/quickstart.py", f"--workdir={tmp_path}/run", *options]) == 0
    capsys.readouterr()
    options = ["--prompt=日本 🐈", "--max_tokens=9", "--num_samples=2"]
    assert sample.main(["sample", f"--workdir={tmp_path}/run", *options]) == 0
    texts = capsys.readouterr().out.split("-" * 80 + "\n")
    assert len(texts) == 2 and all(text.startswith("日本 🐈") for text in texts)
