"""A function of flash-linear-attention (fla) on a GPU, in a process of its own.

    python benchmarks/harness/torchrecurrence.py

A worker process: see `serving.py`, beside this file, for the protocol. Imports nothing of attnlab.
"""

import importlib
import time

import numpy as np
import torch


class Contender:
    """One function of `fla.ops` on the arrays of a file.

    Args:
      path: a `.npz` file with q, k, v `[B, T, H, D]`, and g and beta if the function has them.
      function: e.g. "chunk_gla".
    """

    def __init__(self, path, function):
        self.run = getattr(importlib.import_module(f"fla.ops.{function.removeprefix('chunk_')}"), function)
        arrays = {name: torch.from_numpy(x).cuda().bfloat16() for name, x in np.load(path).items()}
        if "g" in arrays:
            arrays["g"] = arrays["g"].float()
        self.arrays = {name: x.requires_grad_() for name, x in arrays.items()}

    def seconds(self, which, calls):
        """Time some calls: "forward", or "backward", which is forward and the gradients of all arrays."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            if which == "forward":
                with torch.no_grad():
                    self.run(**self.arrays)
            else:
                torch.autograd.grad(self.run(**self.arrays)[0].float().sum(), list(self.arrays.values()))
        torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    from serving import serve

    serve(Contender)
