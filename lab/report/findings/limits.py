"""Findings about limits: unfinished cells, emulated compute, noise and shared cores."""

from collections.abc import Iterator

from lab.report.sentences import BOUND, REACH, ReportFinding, listed, timed
from lab.report.view import CellRow, ComparisonGroup, nodes_text, percent

_NOISY = 0.5  # of the step: a wider interval gets a warning


def unfinished(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Name the cells that failed, are pending, or have fewer repeats than planned."""
    texts = (
        ("failed", "is", "are", "failed and {} left out of every comparison."),
        ("pending", "has", "have", "{} not run yet."),
        (
            "partial",
            "is",
            "are",
            "{} only partly done: fewer repeats than planned ended well.",
        ),
    )
    for status, singular, plural, text in texts:
        names = [_quoted(row) for row in block.rows if row.status == status]
        if names:
            yield ReportFinding(
                REACH,
                f"{listed(names)} {text.format(plural if len(names) > 1 else singular)}",
                f"{len(names)} of {len(block.rows)} cells",
                caution=True,
            )


def oversubscription(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Name the numbers of nodes on which ranks shared cores."""
    rows = [row for row in block.measured if row.cell.get("oversubscribed")]
    if rows:
        counts = sorted({row.nodes for row in rows})
        yield ReportFinding(
            BOUND,
            f"On {listed(list(map(str, counts)))} nodes the ranks share cores: compute and waiting "
            "times, speed-ups and efficiencies are not those of separate machines. Bytes sent and "
            "losses are not affected.",
            listed([row.name for row in rows]),
            caution=True,
        )


def emulation(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Say what emulated compute leaves out."""
    if block.emulated and block.settings.get("compute") not in (None, "real") and block.measured:
        yield ReportFinding(
            REACH,
            "Compute is EMULATED: step times, overlap, waiting and bytes are valid. There are no "
            "losses and no accuracies, and memory does not include activations.",
            f"times of profile {block.settings['compute']}",
            caution=True,
        )


def noisy(block: ComparisonGroup) -> Iterator[ReportFinding]:
    """Name the cells whose repeats differ too much for a conclusion."""
    rows = [row for row in block.measured if noisy_interval(row)]
    if rows:
        yield ReportFinding(
            REACH,
            f"The repeats of {listed([_quoted(row) for row in rows])} differ so much that the "
            f"95 % interval is wider than {percent(_NOISY)} of the step. Run more repeats, or use "
            "a machine that does nothing else.",
            "; ".join(f"{row.name}: {timed(row)}" for row in rows),
            caution=True,
        )


def noisy_interval(row: CellRow) -> bool:
    """Return whether the repeats of a cell differ too much for a conclusion."""
    ends = row.interval("step")
    return ends is not None and ends[1] - ends[0] > _NOISY * row.measured_step


def _quoted(row: CellRow) -> str:
    """Return the cell for a list of names: ``ring on 2 nodes``."""
    return f"{row.sync} on {nodes_text(row.nodes)}"
