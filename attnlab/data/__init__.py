"""Text in, batches of tokens out."""
