"""Weights on nodes: who wants which revision where, and what is there."""
