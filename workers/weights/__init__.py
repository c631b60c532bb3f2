"""Weights on a node's own disk: fetched piece by piece, checked as they arrive, kept by revision."""
