"""Small files of measured steps for the tests of published steps and their scores."""

import csv
import io

COLUMNS = {
    "group": "one",
    "model": "a model",
    "grad_megabytes": "100",
    "ranks_per_node": "1",
    "nodes": "4",
    "rate_gbit": "10",
    "transport": "TCP",
    "software": "PyTorch NCCL",
    "strategy": "ddp",
    "batch_per_rank": "32",
    "one_rank_batch": "32",
    "one_rank_step_s": "0.2",
    "one_node_step_s": "",
    "measured_step_s": "0.3",
}


def table(*rows):
    """Return the text of a file with these rows, each a dict of what differs from ``COLUMNS``."""
    written = io.StringIO()
    writer = csv.DictWriter(written, COLUMNS)
    writer.writeheader()
    writer.writerows([COLUMNS | row for row in rows])
    return written.getvalue()
