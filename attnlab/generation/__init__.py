"""Generating and scoring text: drawing, decoding, stop strings, log-probabilities."""
