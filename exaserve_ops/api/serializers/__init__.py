"""What REST reads and writes. Names carry their units; unknown fields are refused, not ignored."""
