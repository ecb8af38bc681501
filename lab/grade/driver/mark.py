"""The beginning of the line on which a rank prints what a check returned; judge.py reads it."""

MARK = "lab-grade-report "
