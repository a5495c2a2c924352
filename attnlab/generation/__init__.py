"""Generating and scoring text: drawing, decoding, drafts, stop strings, log-probabilities."""
