"""Engines that a replica can run, behind one port."""
