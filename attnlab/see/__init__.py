"""Look inside any Flax model: capture, edit, ablate, patch and attribute, and show it in one offline page."""
