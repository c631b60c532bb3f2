"""Weights on their way to nodes, releases, and how they reach replicas."""
