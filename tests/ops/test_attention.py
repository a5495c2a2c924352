"""The front door says in one line what is wrong with its arguments, and what would run."""

import jax
import jax.numpy as jnp
import pytest

import attnlab
from attnlab.masks import Causal, Dense, Padding
from attnlab.score_mods import ALiBi, SoftCap

Q = jnp.zeros((2, 5, 4, 8))
K = jnp.zeros((2, 7, 2, 8))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"q": jnp.zeros((4, 8))}, r"q has shape \(4, 8\), expected \[\.\.\., length, heads, features\]"),
        ({"k": K[0]}, r"k has batch axes \(\) and q has \(2,\)"),
        ({"k": K[..., :4]}, "k has 4 features a head and q has 8"),
        ({"v": K[:, :3]}, r"v has \(length, heads\) \(3, 2\) and k has \(7, 2\)"),
        ({"k": jnp.zeros((2, 7, 3, 8)), "v": jnp.zeros((2, 7, 3, 8))}, "q has 4 heads and k has 3: .* multiple"),
        ({"mask": Causal()}, r"mask Causal compares positions, but Tq = 5 and Tk = 7 differ: pass q_positions"),
        ({"score_mod": ALiBi(jnp.ones(4))}, "score mod ALiBi compares positions"),
        ({"score_mod": ALiBi(jnp.ones(3))}, r"ALiBi slopes have shape \(3,\), expected \(4,\)"),
        ({"score_mod": jnp.tanh}, "expected score mods"),
        ({"mask": jnp.ones((2, 1, 1, 7), bool)}, r"Dense mask has shape \(2, 1, 1, 7\), expected exactly \(5, 7\) or"),
        ({"mask": jnp.ones((2, 5, 7), bool)}, r"Dense mask has shape \(2, 5, 7\).*add the head axis"),
        ({"mask": Padding(jnp.array([1, 2, 3]))}, r"lengths have shape \(3,\), expected \(\) or q's batch axes \(2,\)"),
        ({"bias": jnp.zeros((4, 5, 7))}, r"bias has shape \(4, 5, 7\), expected \(5, 7\) or \(2, 4, 5, 7\)"),
        ({"bias": jnp.zeros(7)}, "bias has shape"),
        ({"sinks": jnp.zeros(2)}, r"sinks has shape \(2,\), expected \(4,\)"),
        ({"q_positions": jnp.arange(4)}, r"q_positions has shape \(4,\), expected \(5,\) or \(2, 5\)"),
        ({"dropout_rate": 0.5}, "needs dropout_key"),
        ({"dropout_rate": 1.0}, r"expected a probability in \[0, 1\)"),
        ({"impl": "flash"}, "impl = 'flash' is unknown: use \"auto\" or one of 'dense'"),
        ({"block_sizes": (0, 4)}, "expected two sizes of 1 or more"),
        ({"impl": "dense", "block_sizes": (4, 4)}, "impl = 'dense' cannot run this: it has no tiles to size"),
        ({"mask": jnp.zeros((5, 7))}, "Dense mask has type float32, expected bool: use .* or bias=array"),
        ({"mask": jnp.ones((5, 7), jnp.int32)}, "Dense mask has type int32, expected bool"),
    ],
)
def test_a_bad_argument_is_one_line_that_names_it(own_errors, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        attnlab.attention(**({"q": Q, "k": K, "v": K} | arguments))
    assert "\n" not in str(error.value)


def test_a_mask_without_its_head_axis_is_not_broadcast_to_the_batch():
    """The trap of (B, 1, 1, N) against (B, N, N): both read as something, neither as what was meant."""
    with pytest.raises(ValueError, match="expected exactly"):
        attnlab.attention(Q[:, :2], K[:, :2], K[:, :2], mask=jnp.ones((2, 2, 2), bool))


def test_a_bool_array_counts_as_a_dense_mask():
    array = jnp.tri(5, dtype=bool)
    x = jax.random.normal(jax.random.key(0), (5, 1, 8))
    assert (attnlab.attention(x, x, x, mask=array) == attnlab.attention(x, x, x, mask=Dense(array))).all()


def test_explicit_positions_let_a_step_attend_to_what_went_before():
    x = jax.random.normal(jax.random.key(0), (7, 1, 8))
    full = attnlab.attention(x, x, x, mask=Causal())
    last = attnlab.attention(x[5:], x, x, mask=Causal(), q_positions=jnp.array([5, 6]), kv_positions=jnp.arange(7))
    assert jnp.allclose(full[5:], last, atol=1e-6)


def test_explain_takes_what_attention_takes():
    x = jnp.zeros((5, 1, 8))
    arguments = (x, x, x, Causal(), SoftCap(2.0), None, 0.5)
    attnlab.attention(*arguments)
    assert attnlab.explain(*arguments, return_lse=True).backend == "dense"


def test_explain_names_the_backend_that_runs():
    explained = attnlab.explain(Q, K, K, score_mod=SoftCap(2.0))
    assert explained.backend in attnlab.implementations() and explained.backend not in explained.rejected
    assert str(explained).startswith(f"runs {explained.backend}")
