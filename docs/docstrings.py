"""Fences doctests in docstrings, which Markdown would show as nested quotations, and documents options."""

import ast
import re

import griffe

_DOCTEST = re.compile(r"^>>> .*?(?=\n[ \t]*\n|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(griffe.Extension):
    """Extends the docstring reader of mkdocstrings."""

    def on_instance(self, *, obj, **_):
        """Changes a docstring as soon as it has been read."""
        if obj.docstring:
            obj.docstring.value = _DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)

    def on_class_members(self, *, cls, **_):
        """Adds a line for each option to the attributes of its class, as `attnlab.support.options.documented` does."""
        before, head, after = (cls.docstring.value if cls.docstring else "").partition("\nAttributes:")
        attributes, blank, rest = after.partition("\n\n")
        values = {name: str(member.value) for name, member in cls.members.items() if member.is_attribute}
        calls = {name: ast.parse(x).body[0].value for name, x in values.items() if x.startswith("option(")}
        lines = "".join(f"\n  {name}: {ast.literal_eval(call.args[0])}." for name, call in calls.items())
        if head:
            cls.docstring.value = f"{before}{head}{attributes.rstrip()}{lines}{blank}{rest}"
