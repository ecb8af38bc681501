"""Processes of emulated nodes and hosts: their output behind a prefix, and one command on several ranks."""
