"""Text from a trained model, and the probability of a given one: drawing, decoding, drafts, stop strings, scores."""
