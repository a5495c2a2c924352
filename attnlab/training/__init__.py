"""The parts of the training loop."""
