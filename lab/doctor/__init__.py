"""``lab doctor``: find what would make a run fail, before it starts. See examination.py."""
