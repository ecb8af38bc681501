"""Start the ranks of ``--distributed`` on this machine, pass signals on to them, report the end.

The ranks print to this process's own terminal. No torch here.
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from common.distributed.spawn import RankExits, run_local_ranks
from common.errors import INTERRUPTED, TO_BE_CONTINUED
from common.utils.processes import shell_status

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SAVE_SECONDS = 120.0


def launch_local_ranks(
    command: Sequence[str], variables: Sequence[Mapping[str, str]], environment: Mapping[str, str]
) -> int:
    """Run ``python command`` once for each of ``variables``; return the exit status.

    That is 0, the status of the rank that failed first, 75 if the ranks stopped after saving, or
    128 + n after signal n. The first signal is passed on to the ranks, which have 120 s to save and
    end; the second one kills them.
    """
    received: list[signal.Signals] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number))

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        exits = run_local_ranks(
            [[sys.executable, "-u", *command]] * len(variables),
            environments=[{**environment, **one} for one in variables],
            stop_signal=lambda: received[0] if received else None,
            stop_seconds=_SAVE_SECONDS,
        )
    except KeyboardInterrupt:
        print("interrupted: a second signal killed the ranks", file=sys.stderr)
        return INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return _status(exits, received[0] if received else None)


def _status(exits: RankExits, received: signal.Signals | None) -> int:
    if not any(exits.statuses):
        return 0
    if set(exits.statuses) <= {0, TO_BE_CONTINUED}:
        return TO_BE_CONTINUED
    if received is not None:
        return 128 + received
    rank = exits.failed[0]
    status = exits.statuses[rank]
    how = f"with status {status}" if status > 0 else f"by signal {-status}"
    print(f"rank {rank} ended first, {how}; its message is above", file=sys.stderr)
    return shell_status(status)
