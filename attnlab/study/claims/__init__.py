"""The studies: one claim about attention per module."""
