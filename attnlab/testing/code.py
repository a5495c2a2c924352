"""A call as Python code that can be pasted."""

import numpy as np

from attnlab.testing.cases import Case

_EXPECTED = "expected = testing.answer(call).out  # compare with my_function(**testing.as_attnlab(call))\n"
_MOST = 400  # numbers of an array that are written out


def code_of(case: Case, why: str) -> str:
    """Python that makes the call of a case; arrays that are too large are drawn again by `attnlab.testing.draw`."""
    head = f"# {case.feature.name}: {why}\n"
    if max(x.size for x in (case.call.q, case.call.k, case.call.v)) > _MOST:
        shape = ", ".join(f"{name}={size}" for name, size in case.shape._asdict().items())
        return (
            f"{head}from attnlab import testing\n\nfeature = testing.FEATURES[{case.feature.name!r}]\n"
            f"call = testing.draw(feature, {case.seed}, testing.Shape({shape})).call\n{_EXPECTED}"
        )
    names = ("q", "k", "v", "mask", "score_mods", "bias", "scale", "sinks", "q_positions", "kv_positions")
    fields = {name: getattr(case.call, name) for name in names}
    used = {name: x for name, x in fields.items() if not (x is None or (isinstance(x, tuple) and not x))}
    lines = [f"    {name}={_text(x)}," for name, x in used.items()]
    types = "" if case.call.q.dtype == np.float32 else "import ml_dtypes\n"
    return (
        f"{head}{types}import numpy as np\n\nfrom attnlab import masks, score_mods, testing\n"
        "from attnlab.testing import AttentionCall\n\n"
        "call = AttentionCall(\n" + "\n".join(lines) + "\n)\n" + _EXPECTED
    )


def _text(x) -> str:
    if isinstance(x, np.ndarray):
        numbers = str(x.astype(np.float64).tolist() if x.dtype.kind in "fV" else x.tolist()).replace("nan", "np.nan")
        kind = f"np.{x.dtype.name}" if x.dtype.name != "bfloat16" else "ml_dtypes.bfloat16"
        return f"np.array({numbers}, {'bool' if x.dtype == bool else kind})"
    if isinstance(x, tuple):
        return f"({', '.join(map(_text, x))},)"
    if isinstance(x, (int, float)):
        return repr(x)
    module = type(x).__module__.rpartition(".")[2]
    module = "masks" if module == "mask_algebra" else module
    fields = {name: value for name, value in vars(x).items() if not name.startswith("_") and value is not None}
    inner = ", ".join(f"{name}={_text(value)}" for name, value in fields.items())
    return f"{module}.{type(x).__name__}({inner})"
