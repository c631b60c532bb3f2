"""Pages: each reads a snapshot and writes through services."""
