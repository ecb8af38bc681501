"""Programs that check a student's functions by calling them in each rank, for ``lab grade``.

``__main__.py`` starts one rank: it joins the group, imports the student's file and runs the
checks of a part. ``checking.py`` runs and reports them; ``cs336.py`` and ``efficient_dl.py`` have
the parts of two courses; ``checks.toml`` has the texts for what they find. They run in the Python
of the submissions, which has torch but not this project.
"""
