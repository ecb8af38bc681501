"""The check of each lesson: a function ``check(student, say)``, which course.py names."""
