"""Look inside Flax models: capture, edit, ablate and patch values, and show attention in one offline page."""

from attnlab.nn.taps import COLLECTIONS
from attnlab.see.capturing import capture, edited, sites
from attnlab.see.edits import Add, Put, Scale
from attnlab.see.effects import ablate, patch
from attnlab.see.head_scores import Scores, scores, shares
from attnlab.see.pages import Page, page
from attnlab.see.results import Effects, Run
from attnlab.see.site import Site, Sites
from attnlab.see.streams import Contributions, contributions

__all__ = [
    "COLLECTIONS",
    "Add",
    "Contributions",
    "Effects",
    "Page",
    "Put",
    "Run",
    "Scale",
    "Scores",
    "Site",
    "Sites",
    "ablate",
    "capture",
    "contributions",
    "edited",
    "page",
    "patch",
    "scores",
    "shares",
    "sites",
]
