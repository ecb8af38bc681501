"""Helpers that every other package may use: files, processes, the system, paths. No torch at import."""
