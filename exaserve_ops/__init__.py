"""ExaServe Ops: the control plane of an inference fleet."""
