"""Plan runs on hardware that is not attached: topologies, compiled programs, and whether they fit."""
