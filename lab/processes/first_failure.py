"""Which of several ranks or nodes failed first: the others only report that it is gone."""

import re
import signal
import textwrap
from collections.abc import Mapping, Sequence

_CONSEQUENCE = re.compile(r"another rank has ended|rank \d+ .*ended or was killed at")


def find_root_failure(
    failed: Sequence[int], statuses: Mapping[int, int], outputs: Mapping[int, str], *, name: str
) -> tuple[int, str]:
    """Return the rank or node that caused the failure of the others, and a message about it.

    Parameters
    ----------
    failed : ranks or nodes in the order in which they ended.
    statuses, outputs : of each rank or node; a negative status is a signal's number.
    name : "rank" or "node".
    """
    errors = {one: last_error_line(outputs[one]) for one in failed}
    causes = (one for one in failed if errors[one] and not _CONSEQUENCE.search(errors[one]))
    culprit = next(causes, failed[0])
    how = f"ended with status {statuses[culprit]}"
    if statuses[culprit] < 0:
        how = f"was killed by {_signal_name(-statuses[culprit])}"
    return culprit, f"{name} {culprit} {how}: {errors[culprit] or 'it printed nothing'}"


def _signal_name(number: int) -> str:
    """Return e.g. "SIGKILL"; real-time signals have no name, nor have the numbers in a bad file."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def last_error_line(output: str) -> str:
    """Return the line that names the error, else the last line.

    The error is this project's own message, or a traceback's last line.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error|[\w.]*(Error|Exception)\b", line)]
    # Whole words only: a path in the line can be copied.
    return textwrap.shorten((errors or lines or [""])[-1], 500, placeholder=" …")
