"""Studies: one claim per module, measured over several seeds, with a table, a figure and a verdict."""
