"""Say why an averaging is wrong, with the audit's name for the mistake and its advice."""

from collections.abc import Mapping

from torch import Tensor

from common.utils.gradient_fit import side_by_side
from lab.audit.findings.finding import catalogue
from lab.evidence import Evidence, explain_parameters, judge_parameters

MEAN_IN_A_COPY = "the mean never reaches parameter.grad: nothing brings it back, or a copy gets it"


def told(finding: str, sentence: str, evidence: str, cure: str | None = None) -> str:
    """Return a cause in one sentence, its evidence, and the audit's advice and name for it.

    cure : what to do, if that is not what the audit's catalogue says.
    """
    advice = cure or catalogue()[finding].cure
    return f"{sentence}: {evidence}. {advice} (lab audit calls this {finding}.)"


def parts_of(after: Tensor, before: Tensor, lengths: Mapping[str, int]) -> dict[str, Evidence]:
    """Return by part's name how what the ranks ended with comes from their own gradients.

    after, before : what each rank ended with and its own gradient, both of shape (ranks, n).
    lengths : of the consecutive parts, by name.
    """
    columns = side_by_side(lengths.values())
    parts = explain_parameters(before.double().numpy(), after.double().numpy(), columns)
    return dict(zip(lengths, parts, strict=True))


def ends_with(name: str, part: Evidence) -> str:
    """Return what the first rank that does not hold the mean ended with in a part."""
    wrong = (rank for rank, source in enumerate(part.sources) if source.text != "the mean")
    rank = next(wrong, 0)
    text = part.sources[rank].text
    return f"rank {rank} ends with {text} on {part.size} ranks, in {name}"


def cause_of(parts: Mapping[str, Evidence], *, exchanged: bool = True) -> str | None:
    """Return what is wrong with gradients that should be the mean; None if nothing is.

    exchanged : whether the ranks sent each other anything.
    """
    wrong = {name: part for name, part in parts.items() if not part.right}
    if not wrong:
        return None
    name, part = next(iter(wrong.items()))
    evidence = ends_with(name, part)
    judgement = judge_parameters(parts)
    if judgement.pattern == "own" and not exchanged:
        return told("group-unused", "the ranks exchange nothing", evidence)
    sentence = MEAN_IN_A_COPY if judgement.pattern == "own" else judgement.sentence
    return told(judgement.finding, sentence, evidence, judgement.cure)
