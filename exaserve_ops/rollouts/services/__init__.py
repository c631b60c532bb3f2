"""Writing of rollouts."""
