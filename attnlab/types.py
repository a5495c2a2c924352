"""Types of annotations."""

import jax
import numpy as np

Array = jax.Array | np.ndarray  # JAX takes NumPy's arrays wherever it takes its own
DType = jax.typing.DTypeLike
