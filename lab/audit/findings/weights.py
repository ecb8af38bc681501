"""Whether the ranks start from the same weights, and keep the same ones.

``check`` names a difference only if no finding about the gradients explains it.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from lab.audit.findings import gradients
from lab.audit.findings.finding import FAULT, Finding, Outcome, Right, Unknown
from lab.audit.findings.gradients.replicas import Replicas, read_replicas
from lab.audit.findings.where import lasting_optimizers, recording_exchanges
from lab.audit.recording import Record, Recording

START = 1e-5
"""Initial weights that differ by more than this, relatively, are different weights."""


def check(recording: Recording) -> Iterator[Outcome]:
    """Check the ranks' weights; see lab/audit/findings/finding.py."""
    if recording.size < 2 or len(recording.ranks) < max(2, recording.size):
        return
    if any(one.get("version") == 1 for rank in recording.ranks for one in rank.of("fsdp")):
        yield Unknown("weights: FSDP1 holds another part of them on each rank")
        return
    replicas = read_replicas(recording)
    differing = False
    firsts = {family[0] for family in lasting_optimizers(recording)}
    for one in replicas.values():
        if one.optimizer not in firsts or 0 not in one.values:
            continue
        if one.spread(0).max(initial=0.0) > START:
            differing = True
            if recording_exchanges(recording):
                yield _different_start(one)
    settings = _different_settings(recording)
    if settings is not None:
        yield settings
    if differing:
        return
    if not any(one.values for one in replicas.values()):
        if not any(rank.by_kind["fsdp"] for rank in recording.ranks):
            yield Unknown("weights: no ranks' weights of equal parameters were seen")
        return
    yield Right("all ranks start from the same weights")
    first = [found for one in replicas.values() if (found := _first_apart(one)) is not None]
    if not first:
        if any(max(one.values) > 0 for one in replicas.values() if one.values):
            yield Right("the ranks' weights stay equal in the watched steps")
    elif settings is None and recording_exchanges(recording) and not _explained(recording):
        yield _name_divergence(recording, *first[0])


def _different_start(one: Replicas) -> Finding:
    spread = one.spread(0)
    names = [one.names[i] for i in np.argsort(-spread) if spread[i] > START]
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    text = (
        f"before the first step {len(names)} of {len(one.names)} parameters differ between the"
        f" ranks, by up to {spread.max():.0%} of their norm: {listed}"
    )
    return Finding("different-start", (text,))


def _explained(recording: Recording) -> bool:
    """Return whether a fault of the gradients makes the weights differ."""
    return any(
        isinstance(one, Finding) and one.entry.severity == FAULT
        for one in gradients.check(recording)
    )


def _first_apart(one: Replicas) -> tuple[Replicas, int] | None:
    """Return the first step before which the weights differ by more than rounding."""
    for step in sorted(one.values):
        apart = float(one.spread(step).max(initial=0.0))
        moved = max(one.moved(step), 1e-12)
        if apart > 1e-6 * (step + 1) and apart > 1e-3 * moved:
            return one, step
    return None


def _steps(recording: Recording, kind: str, optimizer: int) -> list[dict[int, Record]]:
    return [
        {one["step"]: one for one in rank.by_kind[kind] if one["o"] == optimizer}
        for rank in recording.ranks
    ]


def _different_settings(recording: Recording) -> Finding | None:
    """Return the finding if learning rates, other numbers or the optimiser's class differ."""
    for o in chain.from_iterable(lasting_optimizers(recording)):
        ranks = _steps(recording, "step", o)
        for step in sorted(set.intersection(*(set(one) for one in ranks))):
            settings = [_comparable(one[step]) for one in ranks]
            for name in settings[0]:
                values = [one.get(name) for one in settings]
                if any(not _alike(value, values[0]) for value in values):
                    listed = ", ".join(f"rank {r}: {value}" for r, value in enumerate(values))
                    return Finding("different-learning-rates", (f"step {step}, {name}: {listed}",))
    return None


def _comparable(record: Record) -> dict[str, Any]:
    """Return a step's settings that are plain values."""
    found: dict[str, Any] = {"optimizer": record.get("optimizer")}
    for index, rate in enumerate(record.get("lr") or ()):
        found["lr" if index == 0 else f"lr of group {index}"] = rate
    for name, value in (record.get("settings") or {}).items():
        if isinstance(value, int | float) or (isinstance(value, str) and " at 0x" not in value):
            found.setdefault(name, value)
    return found


def _alike(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, int | float):
        return bool(np.isclose(value, other, rtol=1e-6, atol=0, equal_nan=True))
    return bool(value == other)


def _name_divergence(recording: Recording, one: Replicas, step: int) -> Outcome:
    """Return what makes the weights differ before ``step``, which were equal before."""
    spread = one.spread(step)
    worst = int(np.argmax(spread))
    text = (
        f"before step {step} the ranks' weights differ by up to {spread[worst]:.1e} of their norm"
        f" ({one.names[worst]}); before that they were equal"
    )
    state = _different_state(recording, one.optimizer, step - 1)
    if state is not None:
        return Finding("different-optimizer-state", (state, text))
    return Finding("weights-diverge", (text,))


def _different_state(recording: Recording, optimizer: int, step: int) -> str | None:
    """Say how the optimisers' states differ although they got equal gradients; None if not."""
    ranks = recording.ranks
    states = _steps(recording, "stepped", optimizer)
    updates = _steps(recording, "step", optimizer)
    if not all(step in one for one in [*states, *updates]):
        return None
    hashes = [one[step].get("state") for one in states]
    if len(set(hashes)) == 1 or any(one is None for one in hashes):
        return None
    for earlier in range(step + 1):
        got = [
            rank.numbers(one[earlier]["got"]) if earlier in one else None
            for rank, one in zip(ranks, updates, strict=True)
        ]
        if any(one is None or not np.array_equal(one, got[0]) for one in got):  # type: ignore[arg-type]  # none is None
            return None
    others = [r for r, one in enumerate(hashes) if one != hashes[0]]
    return (
        f"after step {step} the optimiser's state on rank {others[0]} differs from rank 0's,"
        " although both got the same gradients"
    )
