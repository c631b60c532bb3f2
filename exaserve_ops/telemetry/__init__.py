"""Samples, roll-ups and the frames that live pages are fed with."""
