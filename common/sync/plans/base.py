"""The contract of a plan: what its strategy sends, what a rank then holds, and the options.

Nothing here imports torch, so `lab predict` can build a plan alone and answer within a second. A
field of a plan that is made by ``option`` is written once: the flags of the parts and of lab, the
recipes' keys and the plan's own check follow from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, ClassVar

from common.errors import UserError
from common.sync.memory_cost import Memory, MemoryCase, replicated
from common.sync.message_cost import Among, Operation, Sends, sends_of
from common.sync.node_layout import NodeLayout
from common.sync.plans.lines import Messages, for_each, operations_of
from common.sync.plans.pieces import SentStep
from common.utils.limits import kind_and_meta, what_to_give

AUTO = "auto"  # in place of an option's value: lab chooses it (lab/predict/bucket_choice.py)


def option(default: Any, help: str, *, defaults: str = "", auto: bool = False) -> Any:
    """Return a plan's dataclass field that users may set.

    Annotate it with its type and range, e.g. ``Annotated[float, Meta(gt=0, le=1)]``.

    Parameters
    ----------
    help : what it means; ``--help`` puts the strategies that take it in front.
    defaults : the default in words, where it is not one value for all strategies that take it.
    auto : whether lab can choose the value, which is ``AUTO`` until then.
    """
    metadata = {"help": help, "defaults": defaults, "auto": auto}
    return field(default=default, metadata={"option": metadata})


@dataclass(frozen=True)
class Option:
    """An option as ``option`` made it; ``annotation`` has its type and range (utils/limits.py)."""

    name: str
    annotation: Any
    default: Any
    help: str
    defaults: str
    auto: bool

    @property
    def kind(self) -> type:
        """The type of its values: float or int."""
        kind, _ = kind_and_meta(self.annotation)
        return kind


@dataclass(kw_only=True)
class MessagePlan:
    """Base class of all plans. A plan states its ``messages`` and defines ``memory``.

    What lines cannot say, a plan says in ``operations``; it also defines ``sends`` if these are
    point-to-point messages. The options of a strategy are the keyword arguments of its plan, which
    raises UserError if one is out of range.
    """

    # What a step sends (lines.py); without any, the plan writes ``operations`` itself.
    messages: ClassVar[Messages] = ()

    # Steps after which the messages repeat.
    period = 1

    # Whether each rank's optimiser updates a part of the parameters only.
    shards_update = False

    # When the messages leave, to continue "The messages of <strategy>".
    leave = "leave after backward"

    # What a prediction of this plan leaves out or cannot know, to continue "<strategy>: ".
    caveat = ""

    def __post_init__(self) -> None:
        for option in self.options():
            value = getattr(self, option.name)
            if option.auto and value == AUTO:
                continue
            if wanted := what_to_give(value, option.annotation):
                raise UserError(f"{option.name}: got {value}, {wanted}")

    @classmethod
    def options(cls) -> list[Option]:
        """Return what users may set, in the order of the fields."""
        return [
            Option(spec.name, spec.type, spec.default, **spec.metadata["option"])
            for spec in fields(cls)
            if "option" in spec.metadata
        ]

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        """List what ``period`` steps send, in order, along the slowest path; for the cost model.

        ``sizes`` : bytes of each parameter's gradient, in the order of the parameters. Strategies
        that look at types and shapes need ``GradientSize.of(parameters)``.
        """
        if not self.messages:
            raise UserError(
                f"{type(self).__name__} lacks operations(), so its time cannot be predicted: write "
                "it, or state its messages (CONTRIBUTING.md says how), or compare with --no-predict"
            )
        return operations_of(self.messages, SentStep(sizes, ranks, vars(self)))

    def layout(self, ranks: int) -> NodeLayout:
        """Return which ranks the operations "among" those of a node, or the leaders, mean.

        The option ``ranks_per_node``, if the plan has it, says how many share a node.
        """
        return NodeLayout.even(ranks, vars(self).get("ranks_per_node") or 1)

    def memory(self, case: MemoryCase) -> Memory:
        """Return the bytes of tensors that a rank holds between two steps, by kind."""
        raise lacks_memory(type(self))

    def update_share(self, ranks: int) -> float:
        """Return the share of the parameters that each rank's optimiser updates."""
        return 1 / ranks if self.shards_update else 1.0

    def bytes_sent(self, sizes: Sequence[int], rank: int, ranks: int) -> Fraction:
        """Return the payload bytes that ``rank`` sends in ``period`` steps."""
        return sum((send.total for send in self.sends(sizes, rank, ranks)), Fraction(0))

    def sends(self, sizes: Sequence[int], rank: int, ranks: int) -> list[Sends]:
        """List what ``rank`` sends to which ranks in ``period`` steps."""
        found = []
        for step in self.operations(sizes, ranks):
            if step.kind == "exchange":
                raise UserError(
                    f"{type(self).__name__} lacks sends(), what a rank sends to whom: write it "
                    "(CONTRIBUTING.md says how)"
                )
            members = self.members(step.among, rank, ranks)
            if rank not in members:
                continue
            place = members.index(rank)
            sends = sends_of(step.kind, step.nbytes, rank=place, ranks=len(members))
            for receivers, nbytes in sends:
                if step.among != "all":
                    receivers = [members[receiver] for receiver in receivers]
                found.append(Sends(receivers, step.count * nbytes))
        return found

    def members(self, among: Among, rank: int, ranks: int) -> Sequence[int]:
        """Return the ranks that take part in an operation of ``rank``."""
        if among == "all":
            return range(ranks)
        layout = self.layout(ranks)
        return layout.leaders if among == "leaders" else layout.ranks_of(layout.node_of(rank))


def lacks_memory(plan: type[MessagePlan]) -> UserError:
    """Return what to say of a plan without ``memory``: no default would be right for all."""
    return UserError(
        f"{plan.__name__} lacks memory(case), the bytes that a rank holds: write it "
        "(CONTRIBUTING.md says how), or derive the plan from ReplicatedPlan if every rank holds "
        "all parameters, gradients and optimiser state"
    )


class ReplicatedPlan(MessagePlan):
    """Base class of the plans of strategies with which every rank holds everything."""

    def memory(self, case: MemoryCase) -> Memory:
        """See the base class."""
        return replicated(case)


class NoSyncPlan(ReplicatedPlan):
    """No messages."""

    messages = for_each("gradient")  # nothing
