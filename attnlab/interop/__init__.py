"""attnlab's operator and models in other people's programs.

`flax`: the attention of Flax's own layers. `export`: a step as a program that runs with JAX alone.
"""

from attnlab.interop import export, flax

__all__ = ["export", "flax"]
