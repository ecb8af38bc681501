"""Folders of runs, as far as measured steps are read of them."""

import json


def run_folder(folder, *, nodes=(0, 1, 2, 3), step_seconds=1.3, section_seconds=None, **changes):
    """Write what a run of one rank for each of these nodes leaves.

    nodes : numbers of nodes, or names of hosts in an older run. changes : of config.json.
    """
    folder.mkdir(parents=True)
    config = {"sync": "all_reduce", "model": "vgg11", "batch_size": 256, "backend": "gloo"}
    config |= {"seed": 0, "world_size": len(nodes)} | changes
    (folder / "config.json").write_text(json.dumps(config))
    summary = {"step_seconds": step_seconds, "section_seconds": section_seconds}
    (folder / "summary.json").write_text(json.dumps(summary))
    seconds = dict.fromkeys(("data", "forward", "backward", "sync", "update", "wait", "wire"), 0.1)
    ranks = []
    for rank, node in enumerate(nodes):
        place = {"host": "host", "node": node}
        if isinstance(node, str):
            place = {"host": node}
        measured = {
            "rank": rank,
            "threads": 1,
            "seconds": seconds | {"step": 1.3},
            "peak_memory_bytes": 1,
            "bytes_sent": 1.0,
            "messages": 1.0,
        }
        ranks.append(measured | place)
    (folder / "ranks.json").write_text(json.dumps({"format": 1, "ranks": ranks}))
    return folder
