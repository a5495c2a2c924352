"""attnlab in other people's programs, and theirs in attnlab.

`flax`: the attention of Flax's own layers. `huggingface`: GPT-2. `torch`: its attention modules, and nanoGPT's
checkpoints. `export`: a step as a program that runs with JAX alone. Other frameworks are imported when they are needed.
"""

from attnlab.interop import export, flax, huggingface, torch

__all__ = ["export", "flax", "huggingface", "torch"]
