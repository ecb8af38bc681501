"""Which of several ranks or nodes failed first: the others only report that it is gone."""

import re
import textwrap
from collections.abc import Mapping, Sequence

from common.utils.processes import how_ended

_CONSEQUENCE = re.compile("another rank has ended|ended or was killed at")


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
    culprit = failed[0]
    for rank in failed:
        error = last_error_line(outputs[rank])
        if error and not _CONSEQUENCE.search(error):
            culprit = rank
            break
    error = last_error_line(outputs[culprit]) or "it printed nothing"
    return culprit, f"{name} {culprit} {how_ended(statuses[culprit])}: {error}"


def last_error_line(output: str) -> str:
    """Return the line that names the error, else the last line.

    The error is this project's own message, or a traceback's last line.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return ""
    errors = [line for line in lines if re.match(r"error|[\w.]*(Error|Exception)\b", line)]
    line = errors[-1] if errors else lines[-1]
    # Whole words only: a path in the line can be copied.
    return textwrap.shorten(line, 500, placeholder=" …")
