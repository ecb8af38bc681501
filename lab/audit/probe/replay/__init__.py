"""Compute the first steps again in one process (only with ``replay``)."""
