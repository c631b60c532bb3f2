"""What happened: an append-only, ordered record."""
