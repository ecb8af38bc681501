"""Does the mean time that a script reports mean what it says? Only checked with ``--clocks``.

Means of parts of a step, such as the exchange alone, are checked by their divisor only. A mean that
the script forms after the cut has fewer steps than the script meant, so its divisor tells nothing.
"""

from collections.abc import Iterator

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found
from lab.audit.recording import RankRecords, Recording
from lab.audit.records import Clock, CodeLine, Step

_FEWEST = 5  # a mean over fewer iterations is not checked: its divisor may mean something else
_SHARE = 0.9  # of the iterations: from this share on something holds for all of them


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield what is wrong with the script's means, a finding of a name each; nothing if unasked."""
    if not recording.clocks:
        return
    means = [(rank, mean) for rank in recording.ranks for mean in _last_means(rank)]
    found_all = [fault for rank, mean in means for fault in _faults(rank, mean)]
    faults = {fault.name: fault for fault in reversed(found_all)}  # the first of a name is shown
    if faults:
        yield from faults.values()
    else:
        yield _covered([mean for _, mean in means])
    if recording.size > 1:
        yield from _printed_loss(recording)


def _covered(means: list[Clock]) -> Outcome:
    """Return over how many steps the last mean of whole steps is formed, if there is one."""
    for mean in reversed(means):
        if _is_of_steps(mean) and not _divides_wrongly(mean):
            return Right(
                "clocks", f"the mean time covers {_iterations(mean)} whole steps, without the first"
            )
    return Unknown("clocks", f"no mean time over {_FEWEST} or more whole steps could be read")


def _printed_loss(recording: Recording) -> Iterator[Finding]:
    """Yield the first print of a loss that is one rank's."""
    for rank in recording.ranks:
        for clock in rank.of(Clock):
            if clock.event == "loss_printed":
                yield found("loss-of-one-rank", clock.at, rank=rank.rank)
                return


def _last_means(rank: RankRecords) -> list[Clock]:
    """Return the last mean of steps, and of parts of a step, that each line of the script forms.

    A running mean is right or wrong at its end. A mean formed after the cut counts only where the
    line formed none before.
    """
    means = [clock for clock in rank.of(Clock) if clock.event == "mean"]
    long = [mean for mean in means if _iterations(mean) >= _FEWEST]
    # the last mean of each line replaces its earlier ones
    after_cut = {_line_and_subject(mean): mean for mean in long if mean.after_cut}
    before_cut = {_line_and_subject(mean): mean for mean in long if not mean.after_cut}
    return list((after_cut | before_cut).values())


def _line_and_subject(mean: Clock) -> tuple[CodeLine | None, bool]:
    """Return the line that forms a mean, and whether it is one of whole steps."""
    return mean.at, _is_of_steps(mean)


def _faults(rank: RankRecords, mean: Clock) -> Iterator[Finding]:
    """Yield what is wrong with a mean; of a part of a step, only divisor and first iteration."""
    number = _iterations(mean)

    def fault(name: str, *, kind: str | None = None, sure: bool = True) -> Finding:
        values = {"rank": rank.rank, "number": number, "divisor": mean.divisor}
        return found(name, mean.at, kind=kind, sure=sure, **values)

    if _divides_wrongly(mean) and not mean.after_cut:
        yield fault("clock-wrong-divisor", sure=abs(mean.divisor - number) <= 2)
    if mean.first:
        yield fault("clock-first-iteration")
    if not _is_of_steps(mean):
        return
    untimed = bool(rank.of(Step)) and not mean.update_timed
    if untimed and mean.before_update == mean.intervals:
        yield fault("clock-before-update", kind="update", sure=False)
    elif mean.device_pending >= max(_FEWEST, _SHARE * mean.intervals):
        yield fault("clock-before-update", kind="device")


def _iterations(mean: Clock) -> int:
    """Return over how many iterations a mean is formed.

    Five or more intervals are one an iteration; fewer are long ones, which hold several steps each.
    """
    return int(mean.intervals if mean.intervals >= _FEWEST else mean.steps)


def _is_of_steps(mean: Clock) -> bool:
    """Return whether a mean is one of iterations of training, and not of parts of them."""
    return mean.backwards >= _SHARE * _iterations(mean)


def _divides_wrongly(mean: Clock) -> bool:
    """Return whether the divisor is near the number of iterations, but counts nothing in the mean.

    A divisor that is far from it, such as the number of samples, may be meant.
    """
    number = _iterations(mean)
    divisors = {
        mean.divisor,
        round(mean.divisor / mean.unit, 6),
    }  # with and without the intervals' factor
    counts = {mean.intervals, mean.steps, mean.backwards, mean.scale}
    if mean.intervals == 1:  # it may end within a step
        counts.add(mean.steps + 1)
    near = any(max(_FEWEST, number / 2) <= divisor <= number * 2 for divisor in divisors)
    return near and not divisors & counts
