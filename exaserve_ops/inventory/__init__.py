"""Nodes, accelerators and the failure domains they stand in."""
