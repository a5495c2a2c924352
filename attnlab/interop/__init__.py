"""Weights in from and out to other frameworks; each is imported when one of its objects or files comes."""
