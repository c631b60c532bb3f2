"""Pure decisions of this app."""
