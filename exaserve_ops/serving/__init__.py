"""Models, deployments and their replicas."""
