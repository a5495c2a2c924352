"""Generate and score text: drawing, decoding, stop strings, log-probabilities."""
