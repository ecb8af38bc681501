"""What a run wrote: its JSON files, and the lines of its records."""

import json


def json_of(folder, name):
    """Return the content of a run's file, e.g. "summary"."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def json_lines(path, *, times=True):
    """Return the lines of metrics.jsonl or epochs.jsonl; without ``times`` no seconds."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {name: value for name, value in line.items() if times or "second" not in name}
        for line in lines
    ]
