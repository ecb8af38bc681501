"""Emulate a cluster on one machine: ``Cluster`` (cluster.py) is all that other packages need."""

from lab.cluster.cluster import FAULTS, Cluster, End, Traffic

__all__ = ["FAULTS", "Cluster", "End", "Traffic"]
