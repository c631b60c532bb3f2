"""The built-in engine: paged KV, continuous batching and prefix reuse on torch, CUDA or CPU."""
