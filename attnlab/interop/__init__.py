"""Interoperability with other frameworks.

`flax`: attnlab's operator in Flax's own layers. `huggingface`: GPT-2 weights. `torch`: attention modules of PyTorch and
nanoGPT checkpoints. `export`: a model's step as a program that runs with JAX alone. Other frameworks are imported only
when needed.
"""

from attnlab.interop import export, flax, huggingface, torch

__all__ = ["export", "flax", "huggingface", "torch"]
