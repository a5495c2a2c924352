"""Interoperability with other frameworks, which are imported only when needed.

`flax`: the operator in Flax's layers. `huggingface`: models of `transformers`. `torch`: attention modules of PyTorch
and nanoGPT checkpoints. `export`: a model's step as a program that runs with JAX alone.
"""

from attnlab.interop import export, flax, huggingface, torch

__all__ = ["export", "flax", "huggingface", "torch"]
