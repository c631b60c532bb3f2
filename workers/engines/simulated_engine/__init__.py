"""A real server without a model: tunable latencies, real block accounting, faults on request."""
