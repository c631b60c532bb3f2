"""What moving conversations costs, and what is left of them when everything dies meanwhile."""
