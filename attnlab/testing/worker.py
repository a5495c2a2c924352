"""One check of `attnlab conform`, in a separate process because the function under test may crash.

    python -m attnlab.testing.worker '{"function": "jax.nn.dot_product_attention", …}'

This writes lines of JSON: the version, the row of each feature as soon as it is known, and the meanings.
"""

import dataclasses
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable

from attnlab.support.errors import UserError


def find(name: str, what: str = "the function") -> Callable:
    """Import the function that `module:name` or `module.name` names; the current folder must be on the path.

    Raises:
      UserError: no such module, or no function of that name in it.
    """
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    module = module.removesuffix(".py")
    if not module or not attribute:
        raise UserError(f"{name}: expected {what} as module:name")
    try:
        target = importlib.import_module(module)
    except Exception as error:  # whatever the module raises
        message = f"{type(error).__name__}: {error}"
        raise UserError(f"{name}: {module} cannot be imported ({message}): fix it, or name another module") from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise UserError(f"{name}: {module} has no {attribute}: expected {what} as module:name")
        target = getattr(target, part)
    if not callable(target):
        raise UserError(f"{name} is a {type(target).__name__}: expected {what}, a callable")
    return target


def subject(function: str, adapter: str | None) -> tuple[Callable, Callable, str]:
    """Load (function, adapter, version) by name; without an adapter, known peers use the adapter in `PEERS`."""
    from attnlab.testing import as_attnlab
    from attnlab.testing.peers import PEERS

    peer = PEERS.get(function.replace(":", "."))
    if peer is None or adapter:
        return find(function), find(adapter, "the adapter") if adapter else as_attnlab, ""
    try:
        loaded = peer.load()
        version = importlib.metadata.version(peer.package)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{function} needs {peer.package} ({error}): pip install {peer.package}") from error
    return loaded, peer.adapter, f"{peer.package} {version}"


def main(request: dict) -> int:
    """Check one function and write its results to standard output, feature by feature."""
    import jax
    import jax.numpy as jnp

    from attnlab.testing import RecurrenceShape, as_attnlab, check_attention, check_recurrence
    from attnlab.testing.subject import AdapterError

    try:
        jax.devices()
    except RuntimeError as error:  # JAX_PLATFORMS names a missing platform: not the function's fault
        raise UserError(f"JAX finds no device: {str(error).splitlines()[0]}") from error
    function, adapter, version = subject(request["function"], request["adapter"])
    _say(version=version)
    options = {
        "features": request["features"],
        "gradients": request["gradients"],
        "cases": request["cases"] * len(request["features"]),
        "on_row": lambda row: _say(row=dataclasses.asdict(row)),
    }
    try:
        if request["recurrence"]:
            calls = request["calls"]
            shapes = [RecurrenceShape(length=n, features=k, values=v) for n, k, v in calls["shapes"]]
            options |= {"shapes": shapes, "dtype": jnp.dtype(calls["dtype"]).type}
            report = check_recurrence(function, None if adapter is as_attnlab else adapter, **options)
        else:
            report = check_attention(function, adapter, **options)
    except AdapterError as error:
        raise UserError(f"{request['adapter']}: {error}") from error
    _say(meanings=report.meanings | ({"it chooses as": ", ".join(report.follows)} if report.follows else {}))
    return 0


def _say(**message) -> None:
    print(json.dumps(message), file=_OUT, flush=True)


if __name__ == "__main__":
    # Functions may print: messages get a separate stream, and printed text goes to standard error.
    _OUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except UserError as user_error:
        _say(error=str(user_error))
        sys.exit(2)
