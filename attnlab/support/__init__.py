"""Errors, files, options, names, progress, timing: used by all other folders, and independent of them."""
