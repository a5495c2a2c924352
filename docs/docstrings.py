"""Fences the doctests of docstrings, which would be nested quotations in Markdown."""

import re

import griffe

_DOCTEST = re.compile(r"^>>> .*?(?=\n[ \t]*\n|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(griffe.Extension):
    """An extension of mkdocstrings' reader of docstrings."""

    def on_instance(self, *, obj, **_):
        """Changes a docstring as soon as it has been read."""
        if obj.docstring:
            obj.docstring.value = _DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
