"""Taking models in from where there is no manifest: listed, fetched once, hashed while they come."""
