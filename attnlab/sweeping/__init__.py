"""The parts of `attnlab sweep`."""
