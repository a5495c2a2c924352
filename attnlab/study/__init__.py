"""Studies: one claim a file, measured over several seeds, with a table, a figure and a verdict."""
