"""Load a run, finished or still running: its model, parameters, tokenizer and config."""

from attnlab.training.loading import Run, load, peek

__all__ = ["Run", "load", "peek"]
