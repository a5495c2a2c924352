"""Plans of runs on hardware that is not here: topologies, compiled programs, and whether they fit."""
