"""Every mixer takes padding, needs all of its state, and names what it cannot take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.masks import Causal, SlidingWindow
from attnlab.nn import CausalConv
from tests.nn.mixers.cases import ALL, EACH, PIECE, X, compiled, token_by_token

# Float32 sums of some tens of terms of size 1, in another order, and norms that amplify.
CLOSE = {"rtol": 0, "atol": 1e-5}
BF16 = 2**-8  # relative rounding of bfloat16


def piece(name, x, cache, lengths):
    """A call of PIECE tokens with a cache and lengths: one program for all tests."""
    params, apply = compiled(name)
    return jax.device_get(apply(params, x, cache=cache, lengths=np.array(lengths, np.int32)))


def empty(name):
    return jax.device_get(ALL[name].empty_cache(2, 8))


def row(cache, n):
    return jax.tree.map(lambda x: x[n], cache)


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), found, expected)


@EACH
def test_mixer_padding_changes_neither_tokens_nor_state(name):
    outs, caches = token_by_token(name)
    padded = X[:, 2 : 2 + PIECE].copy()
    padded[0, 3:] = padded[1] = np.nan
    out, cache = piece(name, padded, caches[2], [3, 0])
    np.testing.assert_allclose(out[0, :3], outs[0, 2:5], **CLOSE)
    assert_close(row(cache, 0), row(caches[5], 0))
    assert_equal(row(cache, 1), row(caches[2], 1))
    # Whatever the padding holds.
    zeros, same = piece(name, np.nan_to_num(padded), caches[2], [3, 0])
    assert_equal((out[0, :3], cache), (zeros[0, :3], same))


@EACH
def test_mixer_reads_all_that_its_state_holds(name):
    params, apply = compiled(name)
    cache = token_by_token(name)[1][6]
    for part in ("state", "conv"):
        if any(leaf.size for leaf in jax.tree.leaves(getattr(cache, part))):
            none = cache._replace(**{part: jax.tree.map(np.zeros_like, getattr(cache, part))})
            outs = [np.asarray(apply(params, X[:, 6:7], cache=each)[0]) for each in (cache, none)]
            assert np.abs(outs[0] - outs[1]).max() > 1e-3, part


@EACH
def test_mixer_no_tokens_leave_the_cache_as_it_is(name):
    params, apply = compiled(name)
    before = token_by_token(name)[1][3]
    out, after = jax.device_get(apply(params, X[:, :0], cache=before))
    assert out.shape == (2, 0, 8)
    assert_equal(after, before)


@EACH
def test_mixer_in_bfloat16_decodes_as_the_full_pass(name):
    module = ALL[name].clone(dtype=jnp.bfloat16)
    params, apply = compiled(name)[0], jax.jit(module.apply)
    x = X.astype(jnp.bfloat16)
    cache, steps = module.empty_cache(2, 8), []
    for part in (x[:, :4], x[:, 4:8], x[:, 8:]):
        out, after = apply(params, part, cache=cache)
        assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, cache)
        cache, steps = after, [*steps, np.asarray(out, np.float32)]
    whole = apply(params, x)
    assert whole.dtype == jnp.bfloat16 and (name == "gru" or cache.state is None or cache.state.dtype == jnp.float32)
    exact = np.asarray(compiled(name)[1](params, X))
    size = np.abs(exact).max()
    np.testing.assert_allclose(np.concatenate(steps, axis=1), np.float32(whole), atol=4 * BF16 * size)
    # Some ten roundings in a row, of inputs, projections, gates and outputs.
    np.testing.assert_allclose(np.float32(whole), exact, atol=10 * BF16 * size)


@EACH
def test_mixer_wrong_inputs_raise_one_line(own_errors, name):
    module = ALL[name]

    def fails(message, x=X, **options):
        with pytest.raises(ValueError, match=message) as raised:
            jax.eval_shape(lambda: module.init(jax.random.key(0), x, **options))
        assert "\n" not in str(raised.value)

    fails(r"inputs of \w+ have shape \(12, 8\), expected \[batch, length, features\]", X[0])
    fails(r"cache of \w+ is \w+ of \(2, 99\), expected MixerState of .*empty_cache", cache=np.zeros((2, 99)))
    fails(r"cache of \w+ is MixerState of .*empty_cache", cache=module.empty_cache(3, 8))
    fails("mask is SlidingWindow, .*causal", mask=SlidingWindow(left=2))
    fails("segments", segments=np.zeros((2, 3), int))
    fails("segments", segments=np.zeros((2, 12), int), cache=module.empty_cache(2, 8))
    fails("lengths", lengths=np.zeros(3, int))
    jax.eval_shape(lambda: module.init(jax.random.key(0), X, mask=Causal()))


class Odd(CausalConv):
    """Returns what the test says."""

    result: object = None

    def mix(self, x, before, tokens):
        return self.result(x)


@pytest.mark.parametrize(
    "result, found",
    [
        (lambda x: x, "no tuple of values"),
        (lambda x: (x, None), "2 values"),
        (lambda x: (x[:, 0], None, None), r"outputs \[2, 8\]"),
    ],
    ids=["array", "pair", "shape"],
)
def test_mix_of_another_result_raises_one_line(own_errors, result, found):
    with pytest.raises(ValueError, match=rf"Odd.mix returned {found}: expected \(outputs \[2, 12, 'd'\], state, last"):
        jax.eval_shape(Odd(result=result).init, jax.random.key(0), X)
