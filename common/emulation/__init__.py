"""Emulated compute: layers that take the times of a profile by sleeping."""
