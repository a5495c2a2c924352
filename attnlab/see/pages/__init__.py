"""One offline HTML page of attention: heads, tokens, scores and checkpoints."""

from attnlab.see.pages.document import Page, page

__all__ = ["Page", "page"]
