"""``lab launch`` and ``lab collect``: one command on several hosts by the system's ``ssh``, and their run folders brought back.

Reading order: ``launch`` (the whole of ``lab launch``), ``hosts`` (the ssh commands), ``command`` (each host's place in the
command), ``node`` and ``nodes`` (the connections), ``probe`` and ``meeting`` (what is asked before the start), ``refusals``
(ssh's errors in words), ``check`` (lab doctor on all), ``record`` (logs), ``collect``.
``remote_agent`` and ``remote_handlers`` run there.
"""
