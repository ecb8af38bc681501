"""Does the mean time that a script reports mean what it says? Only checked with ``--clocks``.

Means of parts of a step, such as the exchange alone, are checked by their divisor only. A mean that
the script forms after the cut has fewer steps than the script meant, so its divisor tells nothing.
"""

from collections.abc import Iterator

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found
from lab.audit.recording import RankRecords, Record, Recording, code_line

_FEWEST = 5  # a mean over fewer iterations is not checked: its divisor may mean something else
_SHARE = 0.9


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield what is wrong with the script's means, a finding of a name each; nothing if unasked."""
    if not recording.clocks:
        return
    means = [(rank, mean) for rank in recording.ranks for mean in _last_means(rank)]
    faults = {one.name: one for rank, mean in reversed(means) for one in _faults(rank, mean)}
    right: list[Outcome] = [
        Right(f"the mean time covers {_iterations(one)} whole steps, without the first")
        for _, one in means
        if _is_of_steps(one) and not _divides_wrongly(one)
    ]
    nothing = Unknown(f"the clock: no mean time over {_FEWEST} or more whole steps could be read")
    yield from faults.values() or right[-1:] or [nothing]
    losses = [
        found("loss-of-one-rank", code_line(one["at"]), rank=rank.rank)
        for rank in recording.ranks
        for one in rank.by_kind["clock"]
        if one["event"] == "loss_printed" and recording.size > 1
    ]
    yield from losses[:1]


def _last_means(rank: RankRecords) -> list[Record]:
    """Return the last mean of steps, and of parts of a step, that each line of the script forms.

    A running mean is right or wrong at its end. Those after the cut count where there is no other.
    """
    means = [
        one
        for one in rank.by_kind["clock"]
        if one["event"] == "mean" and _iterations(one) >= _FEWEST
    ]
    early_last = sorted(means, key=lambda one: not one["after_cut"])
    return list({(str(one["at"]), _is_of_steps(one)): one for one in early_last}.values())


def _faults(rank: RankRecords, mean: Record) -> list[Finding]:
    number, divisor, of_steps = _iterations(mean), mean["divisor"], _is_of_steps(mean)
    untimed = bool(rank.by_kind["step"]) and not mean["update_timed"]
    early = untimed and mean["before_update"] == mean["intervals"]
    pending = mean["device_pending"] >= max(_FEWEST, _SHARE * mean["intervals"])
    wrong = _divides_wrongly(mean) and not mean["after_cut"]
    cases = (  # name, kind, whether it holds, whether it is sure
        ("clock-wrong-divisor", None, wrong, abs(divisor - number) <= 2),
        ("clock-first-iteration", None, mean["first"], True),
        ("clock-before-update", "update", of_steps and early, False),
        ("clock-before-update", "device", of_steps and pending and not early, True),
    )
    return [
        found(
            name,
            code_line(mean["at"]),
            kind=kind,
            sure=sure,
            rank=rank.rank,
            number=number,
            divisor=divisor,
        )
        for name, kind, holds, sure in cases
        if holds
    ]


def _iterations(mean: Record) -> int:
    """Return over how many iterations a mean is formed: its intervals, or what long ones hold."""
    return int(mean["intervals"] if mean["intervals"] >= _FEWEST else mean["steps"])


def _is_of_steps(mean: Record) -> bool:
    """Return whether a mean is one of iterations of training, and not of parts of them."""
    return bool(mean["backwards"] >= _SHARE * _iterations(mean))


def _divides_wrongly(mean: Record) -> bool:
    """Return whether the divisor is near the number of iterations, but not a number of anything.

    Another one, such as the number of samples, may be meant.
    """
    number = _iterations(mean)
    divisors = {mean["divisor"], round(mean["divisor"] / mean["unit"], 6)}
    counts = {mean[name] for name in ("intervals", "steps", "backwards", "scale")}
    counts.add(mean["steps"] + (mean["intervals"] == 1))  # a single one may end within a step
    near = any(max(_FEWEST, number / 2) <= one <= number * 2 for one in divisors)
    return near and not divisors & counts
