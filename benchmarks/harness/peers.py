"""The operator's contenders: attnlab's backends and other libraries' attention, behind one interface."""

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import attnlab
from attnlab.masks import Causal, Mask, Segments, SlidingWindow
from attnlab.score_mods import ALiBi, ScoreMod, SoftCap, alibi_slopes

UNIT = {"bfloat16": 2.0**-8, "float32": 2.0**-24}  # unit roundoff: the largest relative error of one rounding


class Task(NamedTuple):
    """The inputs of one benchmark.

    Attributes:
      mask: "causal"; "window", causal with only `window` visible keys before each query; "documents", causal within
        each document; "soft cap", causal with scores capped at 30; "alibi", causal with a slope for each head.
      q, k, v, d_out: `[B, T, H, D]`, inputs and the gradient of the output.
      window: how many keys before each query are visible, if `mask` is "window".
      ids: int32 `[B, T]`, the document of each token, for "documents".
    """

    mask: str
    q: jax.Array
    k: jax.Array
    v: jax.Array
    d_out: jax.Array
    window: int
    ids: jax.Array


def task(mask: str, arrays, window: int, documents: int) -> Task:
    """Make a task from q, k, v and d_out `[B, T, H, D]`, with this number of equally long documents per sequence."""
    batch, length = arrays[0].shape[:2]
    ids = jnp.broadcast_to(jnp.arange(length) * documents // length, (batch, length))
    return Task(mask, *arrays, window, ids.astype(jnp.int32))


class Contender(NamedTuple):
    """A contender's two functions, without arguments.

    Attributes:
      forward: returns the output, `[B, T, H, D]`.
      backward: runs forward and backward; returns the gradients of q, k and v. None if there is no backward pass.
      compile: compiles both, before calls are timed.
    """

    forward: Callable
    backward: Callable | None
    compile: Callable = lambda: None


def installed() -> list[str]:
    """Names of the contenders whose packages are installed, attnlab's first."""
    return [name for name, (package, _) in PEERS.items() if importlib.util.find_spec(package) is not None]


def enter(name: str, task: Task) -> Contender:
    """Prepare the contender of that name for a task."""
    return PEERS[name][1](task)


def _jax(attend, task, *data) -> Contender:
    """The contender of `attend(q, k, v, *data)`; `data` are arguments of the compiled program, not constants in it."""

    def backward(q, k, v, d_out, *data):
        return jax.vjp(lambda q, k, v: attend(q, k, v, *data), q, k, v)[1](d_out)

    programs = {"forward": jax.jit(attend), "backward": jax.jit(backward)}
    inputs = {"forward": (task.q, task.k, task.v, *data), "backward": (task.q, task.k, task.v, task.d_out, *data)}

    def compile_all():
        programs.update({which: programs[which].lower(*inputs[which]).compile() for which in inputs})

    forward, backward = (lambda which=which: programs[which](*inputs[which]) for which in inputs)
    return Contender(forward, backward, compile_all)


def ours(impl: str, task: Task) -> Contender:
    """attnlab with one of its backends, or "auto"."""

    def attend(q, k, v, *ids):
        return attnlab.attention(q, k, v, mask_of(task, *ids), mod_of(task), impl=impl)

    return _jax(attend, task, *((task.ids,) if task.mask == "documents" else ()))


def mask_of(task: Task, *ids: jax.Array) -> Mask:
    """The task's mask as attnlab's; `ids` for "documents"."""
    masks = {"window": lambda: SlidingWindow(task.window), "documents": lambda: Causal() & Segments(*ids)}
    return masks.get(task.mask, Causal)()


def mod_of(task: Task) -> ScoreMod | None:
    """The task's score mod as attnlab's."""
    if task.mask == "soft cap":
        return SoftCap(30.0)
    return ALiBi(alibi_slopes(task.q.shape[-2])) if task.mask == "alibi" else None


def jax_nn(task: Task, attend: Callable = jax.nn.dot_product_attention) -> Contender:
    """`jax.nn.dot_product_attention`, or a function with the same arguments."""
    if mod_of(task) is not None:
        raise ValueError("it has no score mods")
    if task.mask == "documents":
        same = lambda ids: ids[:, None, :, None] == ids[:, None, None, :]  # noqa: E731
        return _jax(lambda q, k, v, ids: attend(q, k, v, mask=same(ids), is_causal=True), task, task.ids)
    window = (task.window, 0) if task.mask == "window" else None
    return _jax(functools.partial(attend, is_causal=True, local_window_size=window), task)


def _tokamax(task):
    import tokamax
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # otherwise tokamax parses this command's flags as its own
    return jax_nn(task, functools.partial(tokamax.dot_product_attention, implementation="xla_chunked"))


def _attnax(task):
    import attnax

    def attend(q, k, v, *ids):
        mods = [attnax.causal_mod()]
        if task.mask == "window":
            mods = [attnax.sliding_window_mod(task.window + 1)]
        mods += [attnax.document_mask_mod(*ids)] if ids else []
        mod = attnax.compose_score_mods(*mods)
        out = attnax.flash_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), score_mod=mod)
        return out.swapaxes(1, 2)

    return _jax(attend, task, *((task.ids,) if task.mask == "documents" else ()))


def _torch(name, task):
    from . import torchattention

    arrays = [x.astype(jnp.float32) for x in (task.q, task.k, task.v, task.d_out)]  # torch takes no bfloat16 from NumPy
    tensors = torchattention.task(task.mask, arrays, task.window, task.ids, dtype=task.q.dtype.name)
    return Contender(*torchattention.Contenders.ENTER[name](tensors))


# By name: the package that a contender needs, and the function that prepares it.
PEERS = {
    "attnlab": ("attnlab", functools.partial(ours, "auto")),
    "attnlab dense": ("attnlab", functools.partial(ours, "dense")),
    "jax.nn": ("jax", jax_nn),
    "torch SDPA": ("torch", functools.partial(_torch, "torch SDPA")),
    "torch FlexAttention": ("torch", functools.partial(_torch, "torch FlexAttention")),
    "tokamax": ("tokamax", _tokamax),
    "attnax": ("attnax", _attnax),
}


def output(contender: Contender) -> np.ndarray:
    """A contender's output, float32 `[B, T, H, D]`; compiles its forward pass."""
    out = contender.forward()
    return np.asarray(out.astype(jnp.float32) if isinstance(out, jax.Array) else out.float())


def relative_error(x, expected) -> float:
    """‖x − x*‖ / ‖x*‖, in the type of x*.

    >>> relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0]))
    0.1
    """
    difference = x.astype(expected.dtype) - expected
    return float(((difference * difference).sum() / (expected * expected).sum()) ** 0.5)
