"""``lab launch`` runs one command on several hosts by the system's ``ssh``; ``lab collect`` copies
their run folders here.

Reading order: ``launch`` (the whole of ``lab launch``), ``hosts`` (the ssh commands, ssh's errors
and their remedies), ``command`` (the command of each rank), ``remote`` (requests to the hosts),
``questions`` (before the start), ``record`` (launch.json), ``collect``. ``node`` runs on the hosts.
"""
