"""``lab doctor``: find what would make a run fail, before it starts. ``examine`` (examination.py) runs every check."""
