"""Nodes that exist only as arithmetic, speaking the real protocol. Nothing here needs Django."""
