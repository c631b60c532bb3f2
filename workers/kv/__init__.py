"""One pool of KV blocks for a node: memory, leases and the rules by which replicas share it."""
