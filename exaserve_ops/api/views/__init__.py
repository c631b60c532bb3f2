"""The endpoints of REST."""
