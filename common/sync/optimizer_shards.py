"""What ``sharded``, ``fsdp`` and ``ddp_zero1`` share: an optimiser that updates this rank's part.

``OptimizerShards.shard`` puts this rank's segments in place of the parameters and keeps its part of
the state; ``gather`` makes the optimiser whole again, so that a checkpoint, another strategy or
another number of ranks finds in it what they expect. ``FlatWeights`` cuts parameters into segments.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from common.distributed.collectives import all_gather_single, gather_states
from common.distributed.process_group import current_world
from common.errors import UserError
from common.sync.flat_buffer import FlatBuffer

# An entry's update depends on this entry's gradient and state alone, so any part can be updated.
ELEMENTWISE = (SGD, Adam, AdamW, Adadelta, Adagrad, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop)

# State of torch's optimisers that is one number for the whole parameter.
_NUMBERS = ("step", "eta", "mu", "mu_product")


@dataclass(frozen=True)
class Segment:
    """This rank's part of a parameter; without entries if the rank has none.

    parameter : shape (entries,), shares memory with the part. part : its entries of the parameter,
    in the order of memory.
    """

    parameter: nn.Parameter
    part: slice


class FlatWeights:
    """The weights of ``parameters`` in one flat tensor, of which each rank updates 1/N.

    The parameters become views of ``tensor``; zeros at its end make N parts of equal length.
    ``own`` is part r on rank r, and ``segments`` holds its piece of each parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        size = dist.get_world_size()
        rank = dist.get_rank()
        buffer = FlatBuffer(parameters, multiple_of=size)
        with torch.no_grad():
            for parameter, view in buffer.views.items():
                parameter.data = view.copy_(parameter)
        self.parameters = parameters
        self.tensor = buffer.tensor
        length = len(self.tensor) // size
        self.own = self.tensor[rank * length :][:length]
        self.segments: dict[nn.Parameter, Segment] = {}
        end = -rank * length  # of the last parameter, counted from the begin of this rank's part
        for parameter in parameters:
            begin = end
            end = end + parameter.numel()
            first = max(begin, 0)
            last = max(begin, 0, min(end, length))
            segment = nn.Parameter(self.own[first:last])
            self.segments[parameter] = Segment(segment, slice(first - begin, last - begin))

    def start_gather(self) -> Any:
        """Send this rank's part to all others, and receive theirs; return the ``dist.Work``."""
        return all_gather_single(self.tensor, self.own, async_op=True)


class OptimizerShards:
    """Switches ``optimizer`` between whole parameters and this rank's segments of them.

    Its ``state_dict`` and ``load_state_dict`` make it whole first, so they are collective calls.
    Raises UserError unless the optimiser is elementwise.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if type(optimizer) not in ELEMENTWISE:
            choices = ", ".join(optimizer_class.__name__ for optimizer_class in ELEMENTWISE)
            raise UserError(
                f"got the optimiser {type(optimizer).__name__}, but with this strategy each rank "
                "updates a part of the entries, so the optimiser must treat every entry by itself: "
                f"{choices}. Choose one of them, or another strategy"
            )
        self._optimizer = optimizer
        self._device = next(p.device for group in optimizer.param_groups for p in group["params"])
        self._whole: list[list[nn.Parameter]] = []  # each group's parameters, while it has segments
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _optimizer: self.gather()),
            optimizer.register_load_state_dict_pre_hook(lambda _optimizer, _state: self.gather()),
        ]

    def shard(self, segments: Mapping[nn.Parameter, Segment]) -> None:
        """Replace each parameter by its segment.

        Parameters that are not in ``segments`` stay. Does nothing if it is done already.
        """
        if self._whole:
            return
        self._segments = segments
        groups = self._optimizer.param_groups
        state = self._optimizer.state
        self._whole = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [
                segments[p].parameter if p in segments else p for p in group["params"]
            ]
        for parameter, segment in segments.items():
            entry = state.pop(parameter, None)
            if entry is not None and len(segment.parameter):
                state[segment.parameter] = {
                    name: _part(name, value, parameter, segment.part)
                    for name, value in entry.items()
                }

    def segment_of(self, parameter: nn.Parameter) -> Segment | None:
        """Return this rank's segment of a parameter; None while the optimiser is whole."""
        return self._segments.get(parameter) if self._whole else None

    def gather(self) -> None:
        """Give the optimiser its whole parameters and state back. Collective.

        Does nothing if it is whole already.
        """
        if not self._whole:
            return
        state = self._optimizer.state
        groups = self._optimizer.param_groups
        mine = {
            str(index): state.pop(segment.parameter)
            for index, segment in enumerate(self._segments.values())
            if segment.parameter in state
        }
        all_ranks = gather_states(current_world(self._device), mine)
        self._restore()
        on_device = any(group.get("fused") or group.get("capturable") for group in groups)
        for index, parameter in enumerate(self._segments):
            parts = [held[str(index)] for held in all_ranks if str(index) in held]
            if parts:
                state[parameter] = {
                    key: _joined(key, [part[key] for part in parts], parameter, on_device)
                    for key in parts[0]
                }

    def norm_over_ranks(self, norm: Tensor) -> Tensor:
        """Return the norm of all ranks' parts together, from that of this rank's: 8 bytes."""
        squares = norm.to(self._device, torch.float64).square()
        dist.all_reduce(squares)
        return squares.sqrt().to(norm.dtype)

    def close(self) -> None:
        """Remove the hooks; drop the state unless ``gather`` was the last call."""
        for hook in self._hooks:
            hook.remove()
        if self._whole:
            self._optimizer.state.clear()
        self._restore()

    def _restore(self) -> None:
        for group, parameters in zip(self._optimizer.param_groups, self._whole, strict=False):
            group["params"] = parameters
        self._whole = []


def _part(name: str, value: Any, parameter: nn.Parameter, part: slice) -> Any:
    """Return this rank's part of a parameter's state."""
    if not isinstance(value, Tensor) or name in _NUMBERS:
        return copy.deepcopy(value)  # a loaded state may share it with the file's entries
    flat = torch.empty(parameter.numel(), dtype=value.dtype, device=value.device)
    flat.as_strided(parameter.shape, parameter.stride()).copy_(value)
    return flat[part].clone()  # of its own memory, so that the rest can be freed


def _joined(name: str, parts: list[Any], parameter: nn.Parameter, on_device: bool) -> Any:
    """Return a parameter's state from the parts of the ranks, in their order.

    on_device : whether the optimiser's kernels want the state's numbers on the GPU, too.
    """
    first = parts[0]
    if isinstance(first, Tensor) and name not in _NUMBERS:
        flat = torch.cat(parts).to(parameter.device)
        return flat.as_strided(parameter.shape, parameter.stride())
    return first.to(parameter.device) if isinstance(first, Tensor) and on_device else first
