"""Attention as a function of arrays; depends on JAX alone."""
