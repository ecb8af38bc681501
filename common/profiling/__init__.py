"""Measurements: sections of a step, messages, layers, links, torch's own profiler."""
