"""Pages, live consumers and figures."""
