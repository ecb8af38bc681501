"""Imported last by the server that forks ranks and programs.

A fork's garbage collector would go through all that the server has imported, and write to it: that
copies the memory that the forks share.
"""

import gc

gc.collect()
gc.freeze()
