"""Kernels that have not run on the hardware they are for: taken by name only."""
