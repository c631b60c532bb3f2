"""Who calls: API keys, kept hashed, and what a caller already asked."""
