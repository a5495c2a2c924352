"""One offline HTML page of attention: heads, tokens, scores and checkpoints, in a file that asks for nothing else."""

from attnlab.see.pages.document import Page, page

__all__ = ["Page", "page"]
