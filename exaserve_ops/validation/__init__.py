"""Validation: whether a model serves here, on which engines, and how well, before anybody depends on it."""
