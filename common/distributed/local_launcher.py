"""Start the ranks of ``--distributed``: torchrun, without the report that it appends to a failure.

Started as a file, with torchrun's arguments. The ranks have said what failed; torchrun's own forty
lines would push that off the screen. Ends with the status of the rank that failed first.
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def launch() -> int:
    """Run torchrun with this process's arguments and return the exit status."""
    logging.disable(logging.ERROR)  # of this process; the ranks have their own
    try:
        main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        ended = f"with status {status}" if status > 0 else f"by signal {-status}"
        print(f"rank {rank} ended first, {ended}; its message is above", file=sys.stderr)
        return status if status > 0 else 128 - status
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(launch())
