"""Has an engine's HTTP server know its sessions' last turns, and move them to other engines between turns."""
