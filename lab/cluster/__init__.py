"""Emulate a cluster on one machine: ``Cluster`` (cluster.py) is all that other packages need."""

from lab.cluster.cluster import Cluster
from lab.cluster.nodes import FAULTS

__all__ = ["FAULTS", "Cluster"]
