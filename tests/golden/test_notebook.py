"""The numbers that the notebook (001) prints about attention, in order, to the printed digits."""

import functools
import math

import jax
import numpy as np

from attnlab import attention, attention_weights
from attnlab.masks import Causal
from attnlab.nn import Head, MultiHeadAttention, StackedHeads

X = np.array(
    [
        [0.43, 0.15, 0.89],  # Your
        [0.55, 0.87, 0.66],  # journey
        [0.57, 0.85, 0.64],  # starts
        [0.22, 0.58, 0.33],  # with
        [0.77, 0.25, 0.10],  # one
        [0.05, 0.80, 0.55],  # step
    ],
    np.float32,
)
BATCH = np.stack([X, X])


class TorchGenerator:
    """The notebook's random numbers: torch's CPU generator after `torch.manual_seed(seed)`, reimplemented."""

    def __init__(self, seed):
        self._twister = np.random.RandomState(seed)

    def _words(self, *shape):
        return self._twister.randint(2**32, size=shape, dtype=np.uint32)

    def rand(self, *shape):
        """`torch.rand`: the low 24 bits of a word, as a float32 in [0, 1)."""
        return (self._words(*shape) & 0xFFFFFF).astype(np.float32) / 2**24

    def linear(self, fan_in, fan_out, bias=False):
        """The parameters of a new `torch.nn.Linear(fan_in, fan_out, bias)`: uniform in ±1/√fan_in.

        Returns:
          (weight, bias): `[fan_out, fan_in]`, the transpose of a flax kernel, and `[fan_out]` or None.
        """
        bound = 1 / math.sqrt(fan_in)
        weight = self.rand(fan_out, fan_in) * (2 * bound) - bound
        return weight, self.rand(fan_out) * (2 * bound) - bound if bias else None

    def randn(self, *shape):
        """`torch.randn` of a multiple of 16 elements: Box and Muller's transform, 8 pairs to 8 cos and 8 sin."""
        d1, d2 = np.moveaxis(self.rand(math.prod(shape)).reshape(-1, 2, 8), 1, 0)
        radius, angle = np.sqrt(-2 * np.log1p(-d1)), 2 * np.pi * d2
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(shape)


@functools.cache
def compiled(function, **options):
    run = jax.jit(functools.partial(function, **options))
    return lambda *args, **arrays: np.asarray(run(*args, **arrays))


def attend(q, k, v, **options):
    return compiled(attention, **options)(q, k, v)


def weigh(q, k, **options):
    return compiled(attention_weights, **options)(q, k)


def assert_prints(computed, printed):
    """`printed` has one row per line, or rows separated by commas."""
    # Printing 4 decimals rounds by up to 5e-5; the few float32 operations before that, on numbers up to 2, by 1e-7
    # each.
    np.testing.assert_allclose(computed, np.loadtxt(printed.replace(",", "\n").splitlines()), rtol=0, atol=5e-5 + 1e-6)


def one_head(x):
    """`[T, D]` as `[T, 1, D]`."""
    return x[:, None]


def projections(draw_kernel):
    """Kernels of a `Head`, in the order in which the notebook draws them."""
    return {name: {"kernel": draw_kernel()} for name in ("query", "key", "value")}


def linear_projections(generator, d_out):
    return projections(lambda: generator.linear(3, d_out)[0].T)


def stacked_heads(generator, d_out):
    """Parameters of two `StackedHeads`, drawn one head after the other."""
    heads = [linear_projections(generator, d_out) for _ in range(2)]
    return {"heads": jax.tree.map(lambda *kernels: np.stack(kernels), *heads)}


def multi_head_attention(generator, d_in, d_out, num_heads):
    """Parameters of `MultiHeadAttention`; only the output has a bias in the notebook, the others are zero."""
    by_head = num_heads, d_out // num_heads
    params = projections(lambda: generator.linear(d_in, d_out)[0].T.reshape(d_in, *by_head))
    for projection in params.values():
        projection["bias"] = np.zeros(by_head, np.float32)
    weight, bias = generator.linear(d_out, d_out, bias=True)
    return params | {"out": {"kernel": weight.T.reshape(*by_head, d_out), "bias": bias}}


def contexts_of(module, params, x):
    return compiled(module.apply)({"params": params}, x)


def self_attention(params):
    """The notebook's SelfAttention: one head without a mask."""
    return contexts_of(Head(head_dim=2, mask=None), params, X[None])[0]


def test_naive_and_stable_softmax_agree():  # In 94, 95
    exponentials = np.exp(X @ X[1])
    naive = exponentials / exponentials.sum()
    stable = weigh(one_head(X[1:2]), one_head(X), scale=1.0)[0, 0]
    for weights in (naive, stable):
        assert_prints(weights, "0.1385 0.2379 0.2333 0.1240 0.1082 0.1581")
        assert_prints(weights.sum(), "1.")


def test_weights_of_all_queries_sum_to_one():  # In 99, 100
    weights = weigh(one_head(X), one_head(X), scale=1.0)[0]
    assert_prints(
        weights,
        """
        0.2098 0.2006 0.1981 0.1242 0.1220 0.1452
        0.1385 0.2379 0.2333 0.1240 0.1082 0.1581
        0.1390 0.2369 0.2326 0.1242 0.1108 0.1565
        0.1435 0.2074 0.2046 0.1462 0.1263 0.1720
        0.1526 0.1958 0.1975 0.1367 0.1879 0.1295
        0.1385 0.2184 0.2128 0.1420 0.0988 0.1896
        """,
    )
    assert_prints(weights.sum(-1), "1.0000 1.0000 1.0000 1.0000 1.0000 1.0000")


def test_contexts_of_all_queries():  # In 96, 101, 102
    assert_prints(
        attend(one_head(X), one_head(X), one_head(X), scale=1.0)[:, 0],
        """
        0.4421 0.5931 0.5790
        0.4419 0.6515 0.5683
        0.4431 0.6496 0.5671
        0.4304 0.6298 0.5510
        0.4671 0.5910 0.5266
        0.4177 0.6503 0.5645
        """,
    )


def test_one_query_with_trainable_weights():  # In 104 to 110
    generator = TorchGenerator(123)
    W_query, W_key, W_value = (generator.rand(3, 2) for _ in range(3))
    query, keys, values = X[1] @ W_query, X @ W_key, X @ W_value
    assert_prints(query, "0.4306 1.4551")
    assert keys.shape == values.shape == (6, 2)
    assert_prints(query @ keys[1], "1.8524")
    assert_prints(query @ keys.T, "1.2705 1.8524 1.8111 1.0795 0.5577 1.5440")
    q, k, v = one_head(query[None]), one_head(keys), one_head(values)
    assert_prints(weigh(q, k)[0, 0], "0.1500 0.2264 0.2199 0.1311 0.0906 0.1820")
    assert_prints(attend(q, k, v)[0, 0], "0.3061 0.8210")


def test_self_attention_v1_with_raw_matrices():  # In 112
    generator = TorchGenerator(123)
    assert_prints(
        self_attention(projections(lambda: generator.rand(3, 2))),
        "0.2996 0.8053, 0.3061 0.8210, 0.3058 0.8203, 0.2948 0.7939, 0.2927 0.7891, 0.2990 0.8040",
    )


def test_self_attention_v2_with_linear_layers():  # In 114
    assert_prints(
        self_attention(linear_projections(TorchGenerator(789), d_out=2)),
        "-0.0739 0.0713, -0.0748 0.0703, -0.0749 0.0702, -0.0760 0.0685, -0.0763 0.0679, -0.0754 0.0693",
    )


# The notebook's v2 from In 115 on; In 128 draws the same.
V2 = linear_projections(TorchGenerator(123), d_out=2)
QUERIES, KEYS, VALUES = (X @ V2[name]["kernel"] for name in ("query", "key", "value"))


def test_v1_with_transposed_weights_of_v2_equals_v2():  # In 115 to 117, exercise 3.1
    v1 = attend(one_head(QUERIES), one_head(KEYS), one_head(VALUES))[:, 0]
    for contexts in (v1, self_attention(V2)):
        assert_prints(
            contexts,
            "-0.5337 -0.1051, -0.5323 -0.1080, -0.5323 -0.1079, -0.5297 -0.1076, -0.5311 -0.1066, -0.5299 -0.1081",
        )


CAUSAL_WEIGHTS = """
    1.0000 0.0000 0.0000 0.0000 0.0000 0.0000
    0.4833 0.5167 0.0000 0.0000 0.0000 0.0000
    0.3190 0.3408 0.3402 0.0000 0.0000 0.0000
    0.2445 0.2545 0.2542 0.2468 0.0000 0.0000
    0.1994 0.2060 0.2058 0.1935 0.1953 0.0000
    0.1624 0.1709 0.1706 0.1654 0.1625 0.1682
"""


def test_masked_weights_are_renormalized():  # In 118 to 121
    weights = weigh(one_head(QUERIES), one_head(KEYS))[0]
    assert_prints(
        weights,
        """
        0.1717 0.1762 0.1761 0.1555 0.1627 0.1579
        0.1636 0.1749 0.1746 0.1612 0.1605 0.1652
        0.1637 0.1749 0.1746 0.1611 0.1606 0.1651
        0.1636 0.1704 0.1702 0.1652 0.1632 0.1674
        0.1667 0.1722 0.1721 0.1618 0.1633 0.1639
        0.1624 0.1709 0.1706 0.1654 0.1625 0.1682
        """,
    )
    masked = weights * Causal().dense(6, 6)
    assert_prints(masked / masked.sum(-1, keepdims=True), CAUSAL_WEIGHTS)


def test_masking_scores_equals_renormalized_weights():  # In 122, 123
    assert_prints(
        np.where(Causal().dense(6, 6), QUERIES @ KEYS.T, -np.inf),
        """
        0.3111   -inf   -inf   -inf   -inf   -inf
        0.1655 0.2602   -inf   -inf   -inf   -inf
        0.1667 0.2602 0.2577   -inf   -inf   -inf
        0.0510 0.1080 0.1064 0.0643   -inf   -inf
        0.1415 0.1875 0.1863 0.0987 0.1121   -inf
        0.0476 0.1192 0.1171 0.0731 0.0477 0.0966
        """,
    )
    assert_prints(weigh(one_head(QUERIES), one_head(KEYS), mask=Causal())[0], CAUSAL_WEIGHTS)


def test_operator_dropout_gives_the_notebook_weights():
    q, k = one_head(QUERIES), one_head(KEYS)
    dropping = compiled(attention, mask=Causal(), dropout_rate=0.5)
    # With the identity for values, contexts are weights.
    dropped = dropping(q, k, one_head(np.eye(6, dtype=np.float32)), dropout_key=jax.random.key(123))[:, 0]
    weights = weigh(q, k, mask=Causal())[0]
    assert_prints(np.where(dropped == 0, weights, dropped / 2), CAUSAL_WEIGHTS)
    assert 0 < (dropped != 0).sum() < (weights != 0).sum()


def test_causal_head_on_batch():  # In 126 to 128
    contexts = contexts_of(Head(head_dim=2), V2, BATCH)
    assert BATCH.shape == (2, 6, 3) and contexts.shape == (2, 6, 2)
    # The last token attends to all, as in exercise 3.1.
    assert_prints(contexts[0, -1], "-0.5299 -0.1081")


def test_two_stacked_heads():  # In 130
    contexts = contexts_of(StackedHeads(num_heads=2, head_dim=2), stacked_heads(TorchGenerator(123), d_out=2), BATCH)
    assert contexts.shape == (2, 6, 4)
    for sequence in contexts:
        assert_prints(
            sequence,
            """
            -0.4519  0.2216 0.4772 0.1063
            -0.5874  0.0058 0.5891 0.3257
            -0.6300 -0.0632 0.6202 0.3860
            -0.5675 -0.0843 0.5478 0.3589
            -0.5526 -0.0981 0.5321 0.3428
            -0.5299 -0.1081 0.5077 0.3493
            """,
        )


def test_two_stacked_heads_of_width_one():  # In 131, exercise 3.2, not reseeded
    generator = TorchGenerator(123)
    stacked_heads(generator, d_out=2)  # In 130
    contexts = contexts_of(StackedHeads(num_heads=2, head_dim=1), stacked_heads(generator, d_out=1), BATCH)
    assert contexts.shape == (2, 6, 2)
    for sequence in contexts:
        assert_prints(
            sequence, "0.0189 0.2729, 0.2181 0.3037, 0.2804 0.3125, 0.2830 0.2793, 0.2476 0.2541, 0.2748 0.2513"
        )


def test_multihead_attention_with_split_weights():  # In 132
    module = MultiHeadAttention(num_heads=2, head_dim=1, out_features=2, mask=Causal())
    contexts = contexts_of(module, multi_head_attention(TorchGenerator(123), 3, 2, num_heads=2), BATCH)
    assert contexts.shape == (2, 6, 2)
    for sequence in contexts:
        assert_prints(
            sequence, "0.3190 0.4858, 0.2943 0.3897, 0.2856 0.3593, 0.2693 0.3873, 0.2639 0.3928, 0.2575 0.4028"
        )


def test_multihead_attention_of_gpt2_size(float64):  # In 133, exercise 3.3, not reseeded
    generator = TorchGenerator(123)
    multi_head_attention(generator, 3, 2, num_heads=2)  # In 132
    params = multi_head_attention(generator, 768, 768, num_heads=12)
    x = generator.randn(2, 1024, 768).astype(np.float64)
    contexts = contexts_of(MultiHeadAttention(num_heads=12, mask=Causal()), params, x)
    assert contexts.shape == (2, 1024, 768)

    # The first and last three features of the first and last three tokens; the output is truncated in the second
    # sequence.
    printed = np.fromstring(
        """
         2.5606e-01 -5.9930e-02  3.9847e-01  2.4789e-01  1.8914e-01 -1.3538e-01
         2.7349e-01  2.0641e-01  1.9273e-01  2.1027e-01  1.5678e-01 -4.5343e-01
         3.3144e-02  1.0040e-01  7.7156e-02 -3.8450e-02 -1.1032e-01 -4.1691e-01
        -2.5707e-02 -6.9448e-03  1.0252e-02  3.4811e-02 -1.6675e-03 -3.0555e-02
        -3.2742e-02 -4.4450e-03 -7.9055e-04  3.0958e-02 -8.3340e-03 -3.2058e-02
        -3.0148e-02 -1.3552e-03 -3.0732e-04  2.4457e-02 -1.4528e-02 -3.3910e-02

         3.2940e-01 -1.7189e-01 -4.2380e-01  1.5147e-01 -3.5167e-01 -4.5434e-01
        -5.7646e-02  8.6548e-02 -3.5733e-01 -1.3894e-01 -2.9612e-01 -1.3889e-01
         1.7297e-01  8.9216e-02  3.5174e-02 -1.9757e-01 -3.0677e-01 -1.6127e-01
        -2.5912e-02
        """,
        sep=" ",
    )
    ends = np.r_[:3, -3:0]
    tokens = contexts[:, ends].reshape(-1, 768)
    computed = tokens[:, ends].ravel()[: printed.size]
    half_a_digit = 0.5e-4 * 10 ** np.floor(np.log10(np.abs(printed)))
    # Computed in float64, so the differences are float32 errors of the notebook: sums of 768 products, whose errors
    # scale with the products, not with the sum. 52 of the 55 numbers agree in every digit; the others differ by 2e-7 of
    # the largest.
    largest = np.abs(tokens).max(-1).repeat(ends.size)[: printed.size]
    assert (np.abs(computed - printed) <= half_a_digit + 3e-7 * largest).all()
