"""Fakes that behave, and real servers to test against."""
