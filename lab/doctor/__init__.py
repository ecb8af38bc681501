"""``lab doctor``: what stands in the way of a run, before it. ``examine`` (command.py) asks every check and gives findings."""
