"""The control plane's side of a simulated fleet: enrolment, deployment, processes."""
