"""How results are judged and shown: statistics over seeds, tables, charts, and one page."""
