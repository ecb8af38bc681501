"""Processes on emulated nodes and hosts: their output, and which failed first."""
