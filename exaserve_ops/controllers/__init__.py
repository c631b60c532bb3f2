"""Reconcilers: snapshot, plan, apply."""
