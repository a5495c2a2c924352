"""Format a call as Python code to paste."""

import numpy as np

from attnlab.testing.cases import Case

_MOST = 400  # largest number of elements in an array that is written out


def code_of(case: Case, why: str, gradients: bool, function, adapter) -> str:
    """Return Python code that compares a function with the answer; calls with large arrays are drawn again."""
    shape = ", ".join(f"{name}={size}" for name, size in case.shape._asdict().items())
    drawn = f"case = testing.draw(testing.FEATURES[{case.feature.name!r}], {case.seed}, testing.Shape({shape}))\n"
    types = "" if case.call.q.dtype == np.float32 else "import ml_dtypes\n"
    head = (
        f"# {case.feature.name}: {why}\n{types}import numpy as np\n\nfrom attnlab import masks, score_mods, testing\n"
        f"from attnlab.testing import AttentionCall\n{_imported(function, 'function')}{_imported(adapter, 'adapter')}\n"
    )
    names = ("q", "k", "v", "mask", "score_mods", "bias", "scale", "sinks", "q_positions", "kv_positions")
    fields = {name: getattr(case.call, name) for name in names}
    used = {name: x for name, x in fields.items() if not (x is None or (isinstance(x, tuple) and not x))}
    lines = "\n".join(f"    {name}={_text(x)}," for name, x in used.items())
    is_small = max(x.size for x in (case.call.q, case.call.k, case.call.v)) <= _MOST
    call = f"call = AttentionCall(\n{lines}\n)\n{drawn}case = case._replace(call=call)\n"
    return (
        f"{head}{call if is_small else f'{drawn}call = case.call'}\n"
        f"results = testing.results(function, case, adapter, gradients={gradients})\n"
        "for name, (found, expected, ratio) in results.items():\n"
        '    print(f"{name}\\n{found}\\nexpected\\n{expected}\\nratio\\n{ratio}")\n'
    )


def _imported(function, name: str) -> str:
    """A line that imports a function under a name; a comment if no module has the function at its top level."""
    module, place = (getattr(function, field, None) or "<" for field in ("__module__", "__qualname__"))
    if "<" in place or "." in place:
        return f"# {name} = the {name} of this check\n"
    return f"from {module} import {place} as {name}\n"


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
