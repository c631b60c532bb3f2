"""Who is alive: leases, and the detector's verdicts."""
