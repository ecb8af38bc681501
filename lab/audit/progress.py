"""How far a running script has come, from what its probe has written so far."""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

_KIND = re.compile(rb'\{"k": "(\w+)"')


class StepProgress:
    """Follows the records in a folder; ``read`` looks for new ones.

    kinds : by process id, how many records of each kind it has written.
    worlds : by process id, the number of ranks with which it makes its process group.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = defaultdict(int)
        self.kinds: dict[int, Counter[str]] = defaultdict(Counter)
        self.worlds: dict[int, int] = {}

    def read(self) -> bool:
        """Return whether the script has come further: whether there are records but stacks."""
        new = False
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets[path])
                content, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] += len(content) + len(newline)
            for line in content.splitlines():
                new |= self._take(int(path.stem), line) != "stack"
        return new

    def _take(self, pid: int, line: bytes) -> str | None:
        """Count a record, and return its kind."""
        if not (match := _KIND.match(line)):
            return None
        kind = match[1].decode()
        self.kinds[pid][kind] += 1
        if kind == "group" or (kind == "call" and b'"init_process_group"' in line):
            record = json.loads(line)
            if isinstance(world := record.get("world"), int):
                self.worlds[pid] = world
        return kind

    @property
    def steps(self) -> int:
        """The greatest number of steps that a process has recorded."""
        return max((kinds["step"] for kinds in self.kinds.values()), default=0)

    def processes_with(self, kind: str) -> set[int]:
        """Return the processes that have written a record of this kind."""
        return {pid for pid, kinds in self.kinds.items() if kinds[kind]}
