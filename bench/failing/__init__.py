"""Parts of `bench.failover`: faults, what was seen of them, and the figures that follow."""
