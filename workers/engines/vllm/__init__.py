"""vLLM: how it is launched and read."""
