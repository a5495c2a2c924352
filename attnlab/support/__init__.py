"""Errors, files, options, names, progress and timing: used by all other folders and independent of them."""
