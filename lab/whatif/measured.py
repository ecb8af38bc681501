"""What others measured and published, as sets that the page of ``lab whatif`` shows.

``published_sets`` returns each set with the state of the page in which it was measured. Imports no
torch.
"""

from collections import Counter
from collections.abc import Sequence

from common.say import count, duration_text, rate_text
from common.sync import STRATEGIES
from common.utils.grouping import grouped
from lab.predict.common_models import common_models
from lab.predict.priors import Beliefs, load_priors
from lab.predict.published import PublishedStep, published_path, read_published
from lab.predict.scenario import Scenario
from lab.whatif.data import MeasuredPoint, MeasuredSet, State

_UNKNOWN_BITS = 10e9  # of a link whose rate is not stated, unless software passes more
_AS_IN_MODELS = "_cifar10"  # common models that are models of this project
_SHARED = "global batch kept"  # in the note of rows whose ranks share one batch


def published_sets() -> list[MeasuredSet]:
    """Return a set for each published setting, in the file's order."""
    rows = read_published(published_path())
    sets = []
    numbers: Counter[str] = Counter()
    for same in grouped((_setting(row), row) for row in rows).values():
        group = same[0].group
        numbers[group] += 1
        name = group if numbers[group] == 1 else f"{group}-{numbers[group]}"
        sets.append(_published_set(name, same))
    return sets


def _setting(row: PublishedStep) -> tuple[object, ...]:
    """Return what rows have in common which differ in strategy and number of nodes alone."""
    return (
        *(row.group, row.model, row.software, row.transport, row.rate_gbit, row.grad_megabytes),
        *(row.ranks_per_node, row.one_rank_batch, row.one_rank_step_s, _scaling(row)),
    )


def _scaling(row: PublishedStep) -> str:
    """Return whether the ranks shared the batch of one rank alone, or had such a batch each."""
    is_shared = row.batch_per_rank * row.ranks == row.one_rank_batch
    if is_shared and _SHARED in row.columns["note"]:
        return "strong"
    return "weak"


def _title(rows: Sequence[PublishedStep]) -> str:
    """Return what was measured, with what a reader knows first and the group's name last."""
    row = rows[0]
    nodes = ", ".join(str(number) for number in sorted({each.nodes for each in rows}))
    ranks = "" if row.ranks_per_node == 1 else f" of {row.ranks_per_node} ranks"
    rate = "" if row.rate_gbit is None else f" at {row.rate_gbit:g} Gbit/s"
    samples = count(round(row.one_rank_batch), "sample")
    owner = "in all" if _scaling(row) == "strong" else "a rank"
    return (
        f"{row.model}: {nodes} nodes{ranks}, {row.transport}{rate}, {row.software}, "
        f"{row.grad_megabytes:g} MB, {samples} {owner}, "
        f"{duration_text(row.one_rank_step_s)} alone ({row.group})"
    )


def _published_set(name: str, rows: Sequence[PublishedStep]) -> MeasuredSet:
    first = rows[0]
    scenario = first.cell(Beliefs.of(load_priors())).scenario
    points = []
    for row in rows:
        note = row.columns["note"]
        points.append(MeasuredPoint(row.strategy, row.nodes, row.measured_step_s, note))
    strategies = sorted({point.strategy for point in points}, key=list(STRATEGIES).index)
    model, gradient_type = _model(first, scenario)
    cluster = scenario.cluster
    assert cluster is not None
    # Where no rate was stated, the software is the limit.
    rate_bits = scenario.rate_bits or max(_UNKNOWN_BITS, scenario.enough_bits)
    state = State(
        model=model,
        parameters=round(1e6 * first.grad_megabytes / 4),
        gradient_type=gradient_type,
        backend=first.backend,
        transport=cluster.transport,
        rate_gbit=rate_bits / 1e9,
        step_ms=round(1e3 * first.one_rank_step_s, 6),
        batch=round(first.one_rank_batch),
        scaling=_scaling(first),
        batch_size=round(first.one_rank_batch),
        ranks_per_node=first.ranks_per_node,
        nodes=max(point.nodes for point in points),
        strategies=strategies,
        focus=strategies[-1],
    )
    about = " ".join(_sentences(first, scenario))
    return MeasuredSet(
        id=name,
        title=_title(rows),
        about=about,
        family=first.backend,
        is_published=True,
        state=state,
        points=points,
    )


def _model(row: PublishedStep, scenario: Scenario) -> tuple[str, str]:
    """Return the model as the page names it, and the type of its gradients."""
    model = common_models().get(scenario.calibration.model)
    if model is None:
        return "own", "fp32"
    # Between 2 and 4 bytes a parameter, in the middle of their logarithms.
    in_half = 1e6 * row.grad_megabytes < 8**0.5 * model.parameters
    return model.name.removesuffix(_AS_IN_MODELS), "fp16" if in_half else "fp32"


def _sentences(row: PublishedStep, scenario: Scenario) -> list[str]:
    """Return where a row was measured, and what the page does not know or takes otherwise."""
    facts = [row.columns[name] for name in ("hardware", "source")]
    sentences = [f"{'; '.join(facts)}."]
    if row.rate_gbit is None:
        sentences.append(
            "The rate of the links is not stated. The page takes one above what the software "
            f"passes ({rate_text(scenario.software_bits)}), so the software is the limit."
        )
    if scenario.node_step_seconds is not None:
        sentences.append(
            "One node with all its ranks took "
            f"{duration_text(scenario.node_step_seconds)} a step. The page takes a typical loss "
            "instead; lab predict --node-step-time takes the number."
        )
    return sentences
