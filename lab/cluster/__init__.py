"""A cluster on one machine: ``Cluster`` (cluster.py) is all that others need; ``lab cluster`` is made of it."""

from lab.cluster.cluster import FAULTS, Cluster, End, Traffic

__all__ = ["FAULTS", "Cluster", "End", "Traffic"]
