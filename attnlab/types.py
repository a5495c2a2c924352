"""Types for annotations."""

import jax
import numpy as np

Array = jax.Array | np.ndarray  # JAX accepts NumPy arrays wherever it accepts JAX arrays
DType = jax.typing.DTypeLike
