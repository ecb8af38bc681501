"""Does the mean time that a script reports mean what it says? Only checked with ``--clocks``.

Of each line of the script that divides a sum of intervals its last mean before the cut counts: a
running mean is right or wrong at its end. Means of parts of a step, such as the exchange alone, are
checked by their divisor only.
"""

from collections.abc import Iterator

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown
from lab.audit.recording import RankRecords, Record, Recording, code_line

_FEWEST = 5
"""A mean over fewer iterations is not checked: its divisor may mean something else."""
_SHARE = 0.9


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield what is wrong with the script's means, a finding of a name each; nothing if unasked."""
    if not recording.clocks:
        return
    found: dict[str, Finding] = {}
    means = [(rank, mean) for rank in recording.ranks for mean in _last_means(rank)]
    for rank, mean in means:
        for finding in _check(rank.rank, mean):
            found.setdefault(finding.name, finding)
    yield from found.values()
    whole = [mean for _, mean in means if _is_of_steps(mean)]
    if whole and not found:
        yield Right(f"the mean time covers {_iterations(whole[-1])} whole steps, without the first")
    elif not found:
        yield Unknown(
            f"the clock: the script computes no mean time over {_FEWEST} or more whole steps"
        )
    yield from _local_losses(recording)


def _last_means(rank: RankRecords) -> list[Record]:
    """Return the last mean that each line forms before the cut."""
    last = {}
    for record in rank.by_kind["clock"]:
        if record["event"] == "mean" and not record["after_cut"]:
            last[str(record["at"])] = record
    return list(last.values())


def _check(rank: int, mean: Record) -> Iterator[Finding]:
    at = code_line(mean["at"])
    number, divisor = _iterations(mean), mean["divisor"]
    if number < _FEWEST:
        return
    if _divides_wrongly(mean):
        added = f"{number} intervals are added" if mean["intervals"] > 1 else f"{number} steps pass"
        observed = f"rank {rank}: {added}, and the time is divided by {divisor:g}"
        sure = "certain" if abs(divisor - number) <= 2 else "likely"
        yield Finding("clock-wrong-divisor", (observed,), at, sure)
    if not _is_of_steps(mean):
        return
    if mean["first_included"]:
        observed = f"rank {rank}: the mean over {number} steps includes the first one"
        if mean["intervals"] > 1:
            observed += f", which takes {mean['first_seconds']:.3g} of {mean['seconds']:.3g} s"
        yield Finding("clock-first-iteration", (observed,), at)
    early, pending = mean["before_update"], mean["device_pending"]
    if mean["intervals"] >= _FEWEST and early == mean["intervals"] and not mean["update_timed"]:
        observed = f"rank {rank}: all {early} intervals end between backward() and the update"
        yield Finding("clock-before-update", (observed,), at, "likely")
    elif mean["intervals"] >= _FEWEST and pending >= _SHARE * mean["intervals"]:
        observed = f"rank {rank}: the GPU is still computing at the end of {pending} intervals"
        yield Finding("clock-before-update", (observed,), at)


def _iterations(mean: Record) -> int:
    """Return over how many iterations a mean is formed: its intervals, or what a long one holds."""
    return int(mean["intervals"] if mean["intervals"] > 1 else mean["steps"])


def _is_of_steps(mean: Record) -> bool:
    """Return whether the mean is one of the iterations of training, and not of parts of them."""
    return bool(_iterations(mean) >= _FEWEST and mean["backwards"] >= _SHARE * _iterations(mean))


def _divides_wrongly(mean: Record) -> bool:
    """Return whether the divisor is near the number of iterations, but not a number of anything.

    Another one, such as the number of samples, may be meant.
    """
    divisor, number = mean["divisor"], _iterations(mean)
    near = divisor >= _FEWEST and number / 2 <= divisor <= number * 2
    counts = {mean["intervals"], mean["steps"], mean["backwards"], mean["scale"]}
    if mean["intervals"] == 1:  # it may end within a step
        counts |= {mean["steps"] + 1}
    return near and divisor not in counts


def _local_losses(recording: Recording) -> Iterator[Finding]:
    for rank in recording.ranks:
        for record in rank.by_kind["clock"]:
            if record["event"] == "loss_printed" and record["local"] and recording.size > 1:
                observed = f"rank {rank.rank}: the loss printed here covers only its own samples"
                yield Finding("loss-of-one-rank", (observed,), code_line(record["at"]))
                return
