"""What runs on a node: the agent, the engines it launches, and the protocol both sides share."""
