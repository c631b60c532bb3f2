"""The node agent: launches, watches, heals, drains and stops the replicas of one node."""
