"""What launchers share: enter namespaces, supervise a rank, show its output, say how it ended.

How long ranks have after a failure or a signal, and the wait for them, are in
common/utils/processes.py (``GRACE_SECONDS``, ``wait_for_ranks``).
"""
