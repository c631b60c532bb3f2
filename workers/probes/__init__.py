"""What a node is made of, read from the machine itself."""
