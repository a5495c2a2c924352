"""Look inside any Flax model: capture, edit, ablate, patch and attribute, and show it in one offline page."""

from attnlab.nn.taps import COLLECTIONS
from attnlab.see.capturing import capture, edited, sites
from attnlab.see.edits import Add, Edit, Freeze, Mean, Put, Resample, Scale, Zero
from attnlab.see.effects import ablate, attribute, patch, paths
from attnlab.see.head_scores import Scores, scores, shares
from attnlab.see.pages import Page, page
from attnlab.see.results import Effects, Run
from attnlab.see.site import Site, Sites
from attnlab.see.streams import Contributions, contributions, lens

__all__ = [
    "COLLECTIONS",
    "Add",
    "Contributions",
    "Edit",
    "Effects",
    "Freeze",
    "Mean",
    "Page",
    "Put",
    "Resample",
    "Run",
    "Scale",
    "Scores",
    "Site",
    "Sites",
    "Zero",
    "ablate",
    "attribute",
    "capture",
    "contributions",
    "edited",
    "lens",
    "page",
    "patch",
    "paths",
    "scores",
    "shares",
    "sites",
]
