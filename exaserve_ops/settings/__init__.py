"""Settings by environment."""
