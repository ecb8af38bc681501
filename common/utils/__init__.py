"""Helpers for every other package: files, processes, the system, paths. No torch at import."""
