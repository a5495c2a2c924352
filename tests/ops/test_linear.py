"""Linear attention: three equivalent forms, and the state that continues them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab import LinearState, linear_attention
from attnlab.ops.linear import FORMS, elu_plus_one
from tests.ops.cases import slow

zeros = functools.partial(np.zeros, dtype=np.float32)


def inputs(length, kv_heads=2, heads=4, batch=(2,), features=6, values=5, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(heads, features), (kv_heads, features), (kv_heads, values)]
    return tuple(rng.standard_normal((*batch, length, *shape)).astype(np.float32) for shape in shapes)


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1.0, np.abs(np.asarray(y)).max(initial=0)))


@pytest.mark.parametrize("form, causal", [(form, True) for form in FORMS] + [("chunked", False)])
def test_forms_equal_the_formula(float64, form, causal):
    q, k, v = (np.asarray(x, np.float64) for x in inputs(7))
    run = jax.jit(lambda q, k, v: linear_attention(q, k, v, impl=form, causal=causal, chunk_size=3))
    out = np.asarray(run(q, k, v))

    def phi(x):
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    for b in range(2):
        for h in range(4):
            for i in range(7):
                js = range(i + 1) if causal else range(7)
                w = np.array([phi(q[b, i, h]) @ phi(k[b, j, h // 2]) for j in js])
                np.testing.assert_allclose(out[b, i, h], w @ v[b, list(js), h // 2] / w.sum(), rtol=1e-12)


@pytest.mark.parametrize(
    "length, chunk_size, causal, normalize, carried",
    [(21, 8, True, True, True), slow(70, 80, True, False, False), slow(33, 4, False, True, True)],
)
def test_forms_agree_in_values_and_gradients(length, chunk_size, causal, normalize, carried):
    q, k, v = inputs(length)
    state_after = jax.jit(functools.partial(linear_attention, return_state=True))
    state = state_after(*inputs(5, seed=1))[1] if carried else None

    def run(impl, q, k, v, state):
        options = {"causal": causal, "normalize": normalize, "return_state": True, "chunk_size": chunk_size}
        return linear_attention(q, k, v, state=state, impl=impl, **options)

    def loss(args, impl):
        answer = run(impl, *args)
        return sum((x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)).sum() for x in jax.tree.leaves(answer)), answer

    step = jax.grad(loss, has_aux=True)
    results = jax.jit(lambda args: {form: step(args, form) for form in FORMS})((q, k, v, state))
    expected = results.pop("naive")
    for result in results.values():
        close(result, expected)


@pytest.mark.parametrize("form", FORMS)
def test_state_continues_a_sequence(form):
    cut = 7

    @jax.jit
    def run(q, k, v):
        whole = linear_attention(q, k, v, return_state=True, impl="naive")
        first, state = linear_attention(q[:, :cut], k[:, :cut], v[:, :cut], return_state=True, impl=form)
        then, state = linear_attention(q[:, cut:], k[:, cut:], v[:, cut:], state=state, return_state=True, impl=form)
        return (jnp.concatenate([first, then], axis=1), state), whole

    close(*run(*inputs(20)))


@pytest.mark.parametrize("form, causal", [(form, True) for form in FORMS] + [("naive", False)])
def test_padding_with_nan_is_inert(form, causal):
    q, k, v = inputs(9)
    lengths = np.array([4, 0])
    spoilt = [np.where(np.arange(9)[:, None, None] < lengths[:, None, None, None], x, np.nan) for x in (k, v)]
    options = {"impl": form, "causal": causal, "return_state": True, "chunk_size": 4}

    def loss(k, v, q, lengths):
        out, state = linear_attention(q, k, v, lengths=lengths, **options)
        return (out**2).sum(), (out, state)

    @jax.jit
    def run(spoilt, q, k, v, lengths):
        gradients, answer = jax.grad(loss, argnums=(0, 1), has_aux=True)(*spoilt, q, lengths)
        return gradients, answer, linear_attention(q[:1, :4], k[:1, :4], v[:1, :4], **options)

    gradients, (out, state), short = jax.tree.map(np.asarray, run(spoilt, q, k, v, lengths))
    close((out[:1, :4], jax.tree.map(lambda x: x[:1], state)), short)
    assert not out[1].any() and not any(x[1].any() for x in state), "a fully masked row returns 0"
    assert all(np.isfinite(x).all() and not x[1].any() and not x[0, 4:].any() for x in gradients)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_is_summed_in_float32(form):
    @jax.jit
    def run(q, k, v):
        exact = linear_attention(*(x.astype(jnp.float32) for x in (q, k, v)), impl="naive")
        return linear_attention(q, k, v, impl=form, return_state=True), exact

    (out, state), exact = run(*(x.astype(jnp.bfloat16) for x in inputs(150)))
    assert out.dtype == jnp.bfloat16 and state.kv.dtype == state.k.dtype == jnp.float32
    # Rounding to bfloat16 (8 bits) is all that may differ: half a unit in the last place of values below 4.
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, atol=2**-7, rtol=2**-8)


def test_vmap_and_batch_axes_agree():
    arguments = inputs(8, batch=(2, 3))
    close(jax.jit(jax.vmap(jax.vmap(linear_attention)))(*arguments), jax.jit(linear_attention)(*arguments))


def test_random_features_approximate_softmax():
    """exp(q·k) = E[exp(w·q − |q|²/2) exp(w·k − |k|²/2)] over normal w (Choromanski et al. 2021, lemma 1)."""

    @jax.jit
    def run(q, k, v, w):
        def features(x):
            return jnp.exp(x @ w - (x**2).sum(-1, keepdims=True) / 2)

        exact = attnlab.attention(q, k, v, mask=attnlab.masks.Causal(), scale=1.0)
        return linear_attention(q, k, v, feature_map=features), exact

    w = np.random.default_rng(9).standard_normal((6, 20_000)).astype(np.float32)
    near, exact = run(*(0.3 * x for x in inputs(12)), w)
    # 20,000 features: a mean of exponentials of deviation near 1 errs by 1/√20,000 = 0.007.
    np.testing.assert_allclose(near, exact, atol=0.02)


def test_elu_plus_one_is_exact_far_below_zero():
    x = np.linspace(-80, 50, 131, dtype=np.float32)
    # exp's argument is off by half a unit in the last place of 80, 4e-6, and the result in proportion.
    np.testing.assert_allclose(jax.jit(elu_plus_one)(x), np.where(x > 0, x + 1, np.exp(np.float64(x))), rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_small_features_keep_values_and_gradients_finite(form):
    q, k = np.full((4, 1, 2), -30, np.float32), np.full((4, 1, 2), -20, np.float32)
    v = np.arange(8, dtype=np.float32).reshape(4, 1, 2)

    @jax.jit
    def run(q, k, v):
        out, back = jax.vjp(lambda q, k, v: linear_attention(q, k, v, impl=form, causal=False), q, k, v)
        return out, back(jnp.ones_like(out))

    out, gradients = jax.tree.map(np.asarray, run(q, k, v))
    np.testing.assert_allclose(out[:, 0], [[3, 4]] * 4, rtol=1e-5)
    assert all(np.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"impl": "fast"}, "impl = 'fast'"),
        ({"chunk_size": 0}, "chunk_size = 0"),
        ({"k": zeros((2, 5, 2, 6)), "v": zeros((2, 5, 2, 5))}, "causal, .*q has 9 .*k 5"),
        ({"lengths": jnp.array([1, 2, 3])}, r"lengths has shape \(3,\), .*\(2,\)"),
        ({"lengths": jnp.array([9, 10])}, "lengths contains 10, expected 0 to 9"),
        ({"state": LinearState(np.zeros((2, 2, 6, 4)), np.zeros((2, 2, 6)))}, r"state\.kv has shape \(2, 2, 6, 4\)"),
        ({"chunk_size": 2.5}, r"chunk_size = 2\.5"),
    ],
)
def test_invalid_argument_raises_one_line(own_errors, change, message):
    q, k, v = inputs(9)
    with pytest.raises(ValueError, match=message) as error:
        linear_attention(**({"q": q, "k": k, "v": v} | change))
    assert "\n" not in str(error.value)
