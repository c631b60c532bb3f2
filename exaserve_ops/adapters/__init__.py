"""What touches the network and other processes, behind ports that the edges define."""
