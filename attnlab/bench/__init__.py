"""Benchmarks against other libraries: contenders alternate, and are compared by medians and ratios."""
