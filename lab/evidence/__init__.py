"""Did the optimisers get the mean of the ranks' gradients, and if not, what instead?

``explain`` finds how often each rank's own gradient counts in what each rank got; ``judge`` names
what such a matrix shows, by one table of rules. Both work on plain arrays.
"""

from lab.evidence.evidence import Evidence, explain, explain_parameters, near
from lab.evidence.rules import CURES, RULES, Judgement, judge, judge_parameters, multiple

__all__ = [
    "CURES",
    "RULES",
    "Evidence",
    "Judgement",
    "explain",
    "explain_parameters",
    "judge",
    "judge_parameters",
    "multiple",
    "near",
]
