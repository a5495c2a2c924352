"""The nearest of some names."""

import difflib


def nearest(name: str, names) -> str:
    """' (did you mean X?)' when one of `names` is close, else ''.

    >>> nearest("widht", ["width", "seed"])
    ' (did you mean width?)'
    """
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
