"""REST for automation."""
