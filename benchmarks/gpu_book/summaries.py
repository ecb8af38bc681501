"""What steps result in: ``show`` prints a child's own; runs and pytest leave theirs elsewhere."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

_FACTS = (
    *("device", "backend", "dataset", "model", "global_batch_size", "steps", "step_seconds"),
    *("samples_per_second", "section_seconds", "total_seconds", "wall_seconds", "test_accuracy"),
    *("ema_test_accuracy", "peak_gpu_memory_bytes"),
)

_WORDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
# "[gw0] [  5%] PASSED tests/a.py::test_b" with xdist, "tests/a.py::test_b PASSED [  5%]" without
_TEST = re.compile(
    rf"^(?:\[gw\d+\] \[ *\d+%\] (?P<word>{_WORDS}) )?(?P<name>\S+::\S+)"
    rf"(?(word)| (?P<last>{_WORDS})\b)",
    re.MULTILINE,
)


def show(result: dict[str, Any], *lines: str) -> None:
    """Print the result as one line of JSON; ``lines`` are what the table shows."""
    text = json.dumps(result | {"lines": list(lines)})
    print(text + "\n", end="", flush=True)  # in one write: another rank may print meanwhile


def facts(folder: Path) -> dict[str, Any]:
    """Return the entries of a run's summary that a result keeps; None for those it lacks."""
    summary = json.loads((folder / "summary.json").read_text())
    return {name: summary.get(name) for name in _FACTS}


def text(found: dict[str, Any]) -> str:
    """Return a run's facts as one line."""
    parts = [f"{found['device']}, {found['backend'] or 'one process'}"]
    if found["step_seconds"]:
        parts.append(f"{1000 * found['step_seconds']:.2f} ms a step")
        parts.append(f"{found['samples_per_second']:,.0f} samples/s")
    parts.append(f"training {found['total_seconds']:.1f} s")
    for name, title in (("test_accuracy", "accuracy"), ("ema_test_accuracy", "EMA accuracy")):
        if found[name] is not None:
            parts.append(f"{title} {100 * found[name]:.2f} %")
    if found["peak_gpu_memory_bytes"]:
        parts.append(f"peak {found['peak_gpu_memory_bytes'] / 1e9:.2f} GB")
    return ", ".join(parts)


def read_run(folder: Path, _output: str) -> dict[str, Any]:
    """Return the result of a step that runs a part, from the run's folder."""
    found = facts(folder)
    return found | {"lines": [text(found)]}


def read_pytest(output: str) -> dict[str, Any]:
    """Return how many tests passed, failed and so on, and the names of those that failed.

    A pytest that was killed has printed no counts: the counts then come from its ``-v`` lines.
    """
    ended = re.search(r"^=* ?((?:\d+ \w+(?:, )?)+) in [\d.]+s\b", output, re.MULTILINE)
    if ended:
        counts = {what: int(number) for number, what in re.findall(r"(\d+) (\w+)", ended[1])}
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    else:
        found = [(one["word"] or one["last"], one["name"]) for one in _TEST.finditer(output)]
        counts = dict(Counter(word.lower() for word, _ in found))
        failed = [name for word, name in found if word in ("FAILED", "ERROR")]
    if not counts:
        raise ValueError("pytest printed no counts")
    line = ", ".join(f"{number} {what}" for what, number in counts.items())
    lines = [line if ended else f"{line} until pytest was killed"]
    lines += [f"failed: {name.rpartition('::')[2]}" for name in failed[:8]]
    return {"counts": counts, "failed": failed, "lines": lines}
