"""Updates with one rank's own gradient: why, and what the ranks exchange in its place."""

from collections.abc import Iterator

import numpy as np

from lab.audit.findings.finding import Finding, Outcome, Unknown
from lab.audit.findings.gradients.combination import GradientStep
from lab.audit.findings.gradients.patterns import Pattern
from lab.audit.findings.gradients.replicas import Replicas
from lab.audit.findings.where import (
    backward_line,
    bypasses_ddp,
    exchange_line,
    exchanges,
    recording_exchanges,
    unawaited,
)
from lab.audit.recording import Numbers, Recording


def check_own(
    recording: Recording, observed: list[Pattern], replicas: Replicas | None
) -> Iterator[Outcome]:
    """Check updates with one rank's own gradient."""
    bad = [one for one in observed if one.kind in {"own", "rows"}]
    unnamed = any(s.get("hint") is None for rank in recording.ranks for s in rank.by_kind["start"])
    if unnamed and not any(rank.by_kind["group"] for rank in recording.ranks):
        yield Unknown("gradients: the script made no process group, so the ranks are not connected")
        return
    everywhere = all(one.kind == "own" for one in bad)
    if everywhere and bypasses_ddp(recording):
        yield bypassed(recording, bad)
        return
    if everywhere and not recording_exchanges(recording):
        return  # group-unused says it
    averaged = _averaged_weights(bad, replicas) if everywhere else None
    mixed = _mixed_weights(recording, bad) if everywhere else None
    if (found := averaged or mixed) is not None:
        yield found
        return
    again = [one for one in bad if not everywhere and _equal_again(one.step, replicas)]
    if again:
        yield Unknown(
            f"gradients: in step {again[0].step.step} the optimisers get different gradients, but"
            " afterwards the ranks make their weights equal"
        )
        return
    if len(bad) == 1 < len(observed):
        yield Unknown(
            f"gradients: the optimisers get the mean in all steps but step {bad[0].step.step}"
        )
        return
    sure = "certain" if len(bad) == len(observed) else "likely"
    yield from _own_findings(recording, bad, sure, len(observed))


def _own_findings(
    recording: Recording, bad: list[Pattern], sure: str, steps: int
) -> Iterator[Outcome]:
    first, line = bad[0], exchange_line(recording, bad[0].step.step) or backward_line(recording)
    if first.kind == "own":
        text = (
            f"step {first.step.step}, all {first.step.size} ranks: each optimiser gets its rank's"
            f" own gradient (in {len(bad)} of {steps} steps)"
        )
        texts = [text]
        if number := unawaited(recording, first.step.step):
            texts.append(f"{number} asynchronous exchanges are started, and nothing waits for them")
        yield Finding("own-gradient", tuple(texts), line, sure)
        return
    listed = "; ".join(f"rank {r} gets {text}" for r, text in enumerate(first.texts))
    single = all(text.endswith("own") or text == "the mean" for text in first.texts)
    name = "own-gradient" if single else "not-the-mean"
    yield Finding(
        name, (f"step {first.step.step}: {listed} (in {len(bad)} of {steps} steps)",), line, sure
    )


def bypassed(recording: Recording, bad: list[Pattern]) -> Finding:
    text = (
        f"step {bad[0].step.step}: the forward pass did not run through DDP, and each optimiser"
        " gets its rank's own gradient"
    )
    return Finding("ddp-bypassed", (text,), backward_line(recording))


def _equal_again(step: GradientStep, replicas: Replicas | None) -> bool:
    """Return whether all ranks have the same weights after they got different gradients."""
    if replicas is None or step.step + 1 not in replicas.values:
        return False
    return replicas.equal(step.step + 1) and not np.allclose(step.got, step.got[0], atol=0)


def _averaged_weights(bad: list[Pattern], replicas: Replicas | None) -> Finding | None:
    """Return the finding if the weights are equal again after updates with different gradients."""
    if replicas is None:
        return None
    for one in bad:
        after = one.step.step + 1
        if after not in replicas.values or replicas.moved(after) < 1e-7:
            continue
        if not replicas.equal(after) or replicas.spread(after).max() > 1e-2 * replicas.moved(after):
            continue
        moved = replicas.values[after][0] - replicas.values[after - 1][0]
        whose = _follows_one_rank(one.step, moved)
        if whose is not None:
            text = f"before step {after} all ranks hold what rank {whose} computed by itself"
            return Finding("own-gradient", (f"step {one.step.step}: {text}",))
        text = (
            f"step {one.step.step}: each optimiser gets its rank's own gradient, and before step"
            f" {after} the weights of all ranks are equal again"
        )
        return Finding("weights-averaged", (text,))
    return None


def _mixed_weights(recording: Recording, bad: list[Pattern]) -> Finding | None:
    """Return the finding if the ranks exchange weights in most of these steps, but no gradients."""
    steps = [one.step.step for one in bad]
    mixing = [step for step in steps if exchanges(recording, step, "weights")]
    if 2 * len(mixing) < len(steps) or any(
        exchanges(recording, step, "gradient") for step in steps
    ):
        return None
    text = (
        f"each optimiser gets its rank's own gradient, and the ranks exchange weights in"
        f" {len(mixing)} of {len(steps)} steps"
    )
    return Finding("weights-averaged", (text,), exchange_line(recording, mixing[0]), "likely")


def _follows_one_rank(step: GradientStep, moved: Numbers) -> int | None:
    """Return the rank whose gradient alone points where the weights moved; None without."""
    if moved.shape != step.got[0].shape:
        return None
    for rank, got in enumerate(step.got):
        factor = float(got @ moved / max(float(got @ got), 1e-300))
        if np.linalg.norm(moved - factor * got) < 1e-2 * np.linalg.norm(moved):
            return rank
    return None
