"""What rollouts and swarms decide. Pure."""
