"""The data plane: picks a node, then a replica, and streams."""
