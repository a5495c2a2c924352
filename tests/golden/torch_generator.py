"""The notebook's (001) random numbers: torch's CPU generator, reimplemented without torch."""

import math

import numpy as np


class TorchGenerator:
    """torch's default generator after `torch.manual_seed(seed)`; successive draws continue the stream."""

    def __init__(self, seed):
        self._twister = np.random.RandomState(seed)

    def _words(self, *shape):
        return self._twister.randint(2**32, size=shape, dtype=np.uint32)

    def rand(self, *shape):
        """`torch.rand`: the low 24 bits of a word, as a float32 in [0, 1)."""
        return (self._words(*shape) & 0xFFFFFF).astype(np.float32) / 2**24

    def linear(self, fan_in, fan_out, bias=False):
        """The parameters of a new `torch.nn.Linear(fan_in, fan_out, bias)`: uniform in ±1/√fan_in.

        Returns:
          (weight, bias): `[fan_out, fan_in]`, the transpose of a flax kernel, and `[fan_out]` or None.
        """
        bound = 1 / math.sqrt(fan_in)
        weight = self.rand(fan_out, fan_in) * (2 * bound) - bound
        return weight, self.rand(fan_out) * (2 * bound) - bound if bias else None

    def randn(self, *shape):
        """`torch.randn` of a multiple of 16 elements: Box and Muller's transform, 8 pairs to 8 cos and 8 sin."""
        d1, d2 = np.moveaxis(self.rand(math.prod(shape)).reshape(-1, 2, 8), 1, 0)
        radius, angle = np.sqrt(-2 * np.log1p(-d1)), 2 * np.pi * d2
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(shape)
