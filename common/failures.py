"""What an error of torch's says about the group: whether a collective broke since another rank had ended, and in which one."""

import re
import traceback

from common.errors import GroupError

_LOST = re.compile(r"connection (closed|reset|refused)|broken pipe|timed? ?out|connect failure|remote process exited|"
                   r"socket|peer", re.IGNORECASE)


def explain_collective_failure(error: BaseException) -> str | None:
    """Return what to tell the user where ``error`` is a collective that lost a rank, else None.

    The collective's name is read from the traceback: torch's message has only the address of a neighbour, often not
    the culprit's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    calls = [frame.name for frame in frames if frame.filename.endswith("distributed_c10d.py")]
    if not _LOST.search(str(error)):
        return None
    collective = next((name for name in calls if name != "wrapper"), None)
    if collective is None:
        in_backward = any(frame.name == "backward" for frame in frames)
        collective = "DistributedDataParallel's all_reduce in backward" if in_backward else "a collective"
    return (f"{collective} broke: another rank has ended, or did not answer in time. Its own output says why; where "
            f"it has none, its process was killed or its node lost. Finished checkpoints are kept. "
            f"(torch says: {first_line(error)})")


def is_torchs(error: BaseException) -> bool:
    """Whether an error was raised by torch, or by code that this project does not know, not by this project."""
    return isinstance(error, RuntimeError) and not isinstance(error, GroupError)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says anything, else its type."""
    lines = [line for line in str(error).strip().split("\n") if line.strip()]
    return lines[0] if lines else type(error).__name__
