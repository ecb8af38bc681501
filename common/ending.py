"""How a process that was a rank ends."""

import atexit
import os
import sys
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """Do what was registered for the end, and end at once, without taking the interpreter down.

    Threads of torch, which may still talk to other ranks, do not always survive that everything is taken down around them:
    "terminate called without an active exception", and the status would be that of a crash, also after a run that went well.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
