"""Weights from one origin to many nodes over rate-limited links: ours against others and the bound."""
