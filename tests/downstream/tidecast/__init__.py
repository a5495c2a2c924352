"""Forecasts of the tide: a small encoder–decoder, and a look into the archive to compare it with."""
