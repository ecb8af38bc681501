"""What runs a course's driver: a file beside its rubric that calls a student's functions.

A driver imports ``checks.py`` alone, which says what it gets and returns. ``__main__.py`` starts
one rank and loads the driver; ``running.py`` joins the group, runs the checks of a part and reports
what they found; ``student.py`` imports the student's file. They run in the Python of the
submissions, which has torch but not this project; docs/courses.md shows how a driver is written.
"""
