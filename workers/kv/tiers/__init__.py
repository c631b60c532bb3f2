"""KV blocks that wait elsewhere: host memory and disk below the memory that is computed in."""
