"""The only code shared by agents and the control plane: messages, names and common digests."""
