"""Judge and show results: statistics over seeds, tables, charts, and one page."""
