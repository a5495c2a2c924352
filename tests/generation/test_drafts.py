"""n-gram drafts: what is guessed, and the same tokens with and without them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.generation.decoding import generate
from attnlab.generation.drafts import Lookup
from attnlab.nn import GPT
from tests.parameters import parameters

PROMPTS = [np.array(prompt) for prompt in ([1], [1, 2, 3, 4] * 3, np.arange(13) % 11)]


@functools.cache
def gpt(positions):
    model = GPT(11, num_layers=1, num_heads=2, width=16, context=16, positions=positions, tie_embeddings=False)
    return model, parameters(model, np.zeros((1, 1), np.int32))


@jax.jit
def propose_5(lookup):
    return lookup.propose(5), lookup.may_pay(5, np.array([True]))


def propose(text, count):
    guessed, may_pay = propose_5(Lookup.of([list(text)]))
    return guessed[0, :count].tolist(), bool(may_pay)


def test_draft_is_what_followed_the_longest_and_latest_occurrence():
    assert propose([1, 2, 3, 4, 7, 5, 2, 3, 4, 8, 1, 2, 3, 4], 2) == ([7, 5], True)
    assert propose([1, 2, 3, 4, 7, 9, 1, 2, 3, 4, 8, 5, 1, 2, 3, 4], 2) == ([8, 5], True)


def test_draft_beyond_the_end_repeats_the_period():
    assert propose([9, 5, 6, 7, 5, 6, 7, 5, 6, 7], 5) == ([5, 6, 7, 5, 6], True)
    assert propose([3] * 6, 4) == ([3] * 4, True)


@pytest.mark.parametrize("text", [[5], [1, 2, 3], [1, 2, 3, 9, 1, 2, 3], list(range(20))])
def test_short_occurrences_are_not_used(text):
    assert not propose(text, 3)[1]


def test_appended_tokens_are_found_as_the_tokens_of_a_prompt():
    longer = Lookup.of([[1, 2, 3, 4, 7, 1, 2]]).append(jnp.array([[3, 4, 9]]), jnp.array([2]))
    whole = Lookup.of([[1, 2, 3, 4, 7, 1, 2, 3, 4]])
    np.testing.assert_array_equal(longer.recent, whole.recent)
    np.testing.assert_array_equal(longer.matching[:, :-1], whole.matching[:, :-1])


def test_drafts_that_do_not_pay_need_ever_longer_occurrences():
    fresh = Lookup.of([[3] * 6])
    wrong = fresh.append(jnp.full((1, 9), 3), jnp.array([1]))
    right = wrong.append(jnp.full((1, 9), 3), jnp.array([9]))
    active = jnp.array([True])
    assert fresh.may_pay(8, active) and not wrong.may_pay(8, active) and right.may_pay(8, active)


def test_one_text_of_a_large_batch_does_not_pay_for_the_others_on_cpus():
    texts = [[3] * 6] + [[1, 2]] * 7
    assert not Lookup.of(texts).may_pay(8, jnp.full(8, True))


GREEDY = {"temperature": 0.0, "end": (2,)}  # one text ends
DRAWN = {"temperature": 0.3, "repetition_penalty": 1.1, "top_p": 0.95, "num_samples": 2}


@pytest.mark.parametrize(
    "positions, draft, options",
    [
        pytest.param("learned", 64, GREEDY, id="greedy-learned-cut"),  # more than the context: cut to 15
        pytest.param("rotary", 5, DRAWN, id="drawn-rotary"),
        *(
            pytest.param(positions, 5, options, id=f"{name}-{positions}", marks=pytest.mark.slow)
            for positions, name, options in (
                ("learned", "greedy", GREEDY),
                ("learned", "drawn", DRAWN),
                ("rotary", "greedy", GREEDY),
                ("alibi", "greedy", GREEDY),
                ("alibi", "drawn", DRAWN),
            )
        ),
    ],
)
def test_drafts_change_no_token(positions, draft, options):
    """Several times the context: with learned positions it is read again, the others roll."""
    plain, drafted = (
        np.stack(list(generate(*gpt(positions), PROMPTS, 60, draft=draft, **options))) for draft in (0, draft)
    )
    np.testing.assert_array_equal(plain, drafted)


def test_draft_that_is_right_is_kept_in_one_pass():
    """A model whose text repeats itself takes fewer passes than tokens."""
    model = GPT(vocab_size=3, num_layers=1, num_heads=1, width=4, context=64, positions="none", mlp_ratio=0)
    params = parameters(model, np.zeros((1, 1), np.int32))
    params = jax.tree.map(np.zeros_like, params)  # all logits are 0: the first token is the most likely, for ever
    passes = 0

    def count(*_):
        nonlocal passes
        passes += 1

    class Counting(GPT):
        def __call__(self, tokens, **options):
            jax.debug.callback(count)
            return super().__call__(tokens, **options)

    counting = Counting(
        **{name: getattr(model, name) for name in GPT.__dataclass_fields__ if name not in ("parent", "name")}
    )
    drawn = np.concatenate(list(generate(counting, params, np.array([0]), 60, temperature=0.0, draft=9)))
    jax.effects_barrier()
    assert drawn.tolist() == [0] * 60
    assert (
        passes <= 1 + 4 + 7 + 3
    )  # the prompt; 4 tokens until an occurrence is long enough; 10 a pass; loops end early
