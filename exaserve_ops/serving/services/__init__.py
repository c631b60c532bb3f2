"""Writing: models, deployments and replicas, one module each."""
