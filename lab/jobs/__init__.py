"""A comparison whose runs others start, each as a job of its own on nodes that it is given: by Slurm, or by hand.

Order: ``plan`` (``lab compare --plan``: the runs by number, before anything runs), ``one_run`` (``lab run-cell``: one of them, on
each of its nodes), ``together`` (``lab report``: what there is, at any moment). Nothing here knows which launcher it is.
"""
