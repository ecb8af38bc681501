"""Ranks on nodes and hosts: what runs there ends with its parent; output; which failed first."""
