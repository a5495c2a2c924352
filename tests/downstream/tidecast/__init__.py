"""Forecasts of the tide: a small encoder–decoder, and attention into an archive to compare it with."""
