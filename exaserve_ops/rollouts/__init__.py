"""Releases on their way to replicas, and weights to nodes."""
