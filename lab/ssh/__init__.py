"""``lab launch`` runs one command on several hosts by the system's ``ssh``; ``lab collect`` copies
their run folders here.

Reading order: ``launch`` (the whole of ``lab launch``), ``hosts`` (the ssh commands), ``command``
(the command of each rank), ``connection`` and ``connections``, ``probe`` and ``master_address``
(questions before the start), ``refusals`` (ssh's errors and their remedies), ``check`` (lab doctor
on all), ``record`` (logs), ``collect``. ``remote_agent`` and ``remote_handlers`` run on the hosts.
"""
