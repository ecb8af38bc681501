"""One run from beginning to end: ``run.py`` is the page to read."""
