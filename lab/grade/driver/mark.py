"""The beginning of the line on which a rank reports; the grader, which needs no torch, reads it."""

MARK = "lab-grade-report "
