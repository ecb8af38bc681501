"""Whether every optimiser gets the mean of what the ranks computed."""

from lab.audit.findings.gradients.updates import check

__all__ = ["check"]
