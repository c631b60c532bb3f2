"""Pure telemetry computations."""
