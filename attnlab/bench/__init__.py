"""Races against named peers: alternating runs in one process, medians and ratios."""
