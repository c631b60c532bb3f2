"""WebSockets: handshake, fan-out of frames and events, and log tails."""
