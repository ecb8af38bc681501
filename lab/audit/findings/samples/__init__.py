"""Which samples each rank trains on, in which order, and how many."""

from lab.audit.findings.samples.shares import check

__all__ = ["check"]
