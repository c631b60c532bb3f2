"""Where a request goes: node first, then replica."""
