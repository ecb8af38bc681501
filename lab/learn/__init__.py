"""Eleven lessons that check themselves: ``lab learn`` in cli.py, their table in course.py."""
