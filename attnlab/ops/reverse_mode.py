"""Operations that have first derivatives in reverse mode alone, where JAX does not say so in words of its own."""

import jax


def once(run, impl: str):
    """`run(plan, …)`, whose derivatives raise ValueError: it is the derivative, or has one, of a `custom_vjp`."""

    def refuse(*_):
        raise ValueError(f"impl = {impl!r} has no derivatives of second order: use impl='dense'")

    refusing = jax.custom_jvp(run, nondiff_argnums=(0,))
    refusing.defjvp(refuse)
    return refusing
