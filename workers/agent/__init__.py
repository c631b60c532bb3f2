"""The node agent: launches, watches, heals, drains and stops the replicas of one node."""

AGENT_VERSION = "0.1.0"
"""Shown on the node's page; compatibility is judged by the protocol's version, not by this."""
