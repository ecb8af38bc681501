"""The optimiser's part of ``sharded``: it updates this rank's segments of the parameters only.

``OptimizerShards.shard`` puts the segments in place of the parameters and keeps this rank's part of
the state; ``gather`` makes the optimiser whole again, so that a checkpoint, another strategy or
another number of ranks finds in it what they expect.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
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

from common.distributed.collectives import gather_states
from common.distributed.process_group import current_world
from common.errors import UserError

# An entry's update depends on this entry's gradient and state alone, so any part can be updated.
ELEMENTWISE = (SGD, Adam, AdamW, Adadelta, Adagrad, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop)

# State of torch's optimisers that is one number for the whole parameter.
_NUMBERS = ("step", "eta", "mu", "mu_product")


@dataclass(frozen=True)
class Segment:
    """This rank's part of a parameter.

    parameter : shape (entries,), shares memory with the part. part : its entries of the parameter,
    in the order of memory.
    """

    parameter: nn.Parameter
    part: slice


class OptimizerShards:
    """Switches ``optimizer`` between whole parameters and this rank's segments of them.

    Its ``state_dict`` and ``load_state_dict`` make it whole first, so they are collective calls.
    Raises UserError unless the optimiser is elementwise.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if type(optimizer) not in ELEMENTWISE:
            raise UserError(
                f"got the optimiser {type(optimizer).__name__}, but with this strategy each rank "
                "updates a part of the entries, so the optimiser must treat every entry by itself: "
                f"{', '.join(one.__name__ for one in ELEMENTWISE)}. Choose one of them, or another "
                "strategy"
            )
        self._optimizer = optimizer
        self._whole: list[list[nn.Parameter]] = []  # each group's parameters, while it has segments
        self._segments: Mapping[nn.Parameter, Segment | None] = {}
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _optimizer: self.gather()),
            optimizer.register_load_state_dict_pre_hook(lambda _optimizer, _state: self.gather()),
        ]

    def shard(self, segments: Mapping[nn.Parameter, Segment | None]) -> None:
        """Replace each parameter by its segment; None: this rank has no part of it.

        Parameters that are not in ``segments`` stay. Does nothing if it is done already.
        """
        if self._whole:
            return
        self._segments = segments
        groups, state = self._optimizer.param_groups, self._optimizer.state
        self._whole = [group["params"] for group in groups]
        for group in groups:
            found = [
                segments[p] if p in segments else Segment(p, slice(0)) for p in group["params"]
            ]
            group["params"] = [segment.parameter for segment in found if segment is not None]
        for parameter, segment in segments.items():
            entry = state.pop(parameter, None)
            if entry is not None and segment is not None:
                state[segment.parameter] = {
                    name: _part(name, value, parameter, segment.part)
                    for name, value in entry.items()
                }

    def gather(self) -> None:
        """Give the optimiser its whole parameters and state back. Collective.

        Does nothing if it is whole already.
        """
        if not self._whole:
            return
        state = self._optimizer.state
        names = {parameter: str(index) for index, parameter in enumerate(self._segments)}
        mine = {
            names[parameter]: state.pop(segment.parameter)
            for parameter, segment in self._segments.items()
            if segment is not None and segment.parameter in state
        }
        all_ranks = gather_states(current_world(next(iter(names)).device), mine)
        self._restore()
        for group in self._optimizer.param_groups:
            on_device = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                parts = [one[names[parameter]] for one in all_ranks if names.get(parameter) in one]
                if parts:
                    state[parameter] = {
                        key: _joined(key, [part[key] for part in parts], parameter, on_device)
                        for key in parts[0]
                    }

    def close(self) -> None:
        """Remove the hooks; drop the state unless ``gather`` was the last call."""
        for hook in self._hooks:
            hook.remove()
        for segment in self._segments.values() if self._whole else ():
            if segment is not None:
                self._optimizer.state.pop(segment.parameter, None)
        self._restore()

    def _restore(self) -> None:
        for group, parameters in zip(self._optimizer.param_groups, self._whole, strict=False):
            group["params"] = parameters
        self._whole = []


def _part(name: str, value: Any, parameter: nn.Parameter, part: slice) -> Any:
    """Return this rank's part of a parameter's state."""
    if not isinstance(value, Tensor):
        return value
    if name in _NUMBERS:
        return value.clone()
    flat = torch.empty(parameter.numel(), dtype=value.dtype, device=value.device)
    flat.as_strided(parameter.shape, parameter.stride()).copy_(value)
    return flat[part].clone()  # of its own memory, so that the rest can be freed


def _joined(name: str, parts: list[Any], parameter: nn.Parameter, on_device: bool) -> Any:
    """Return a parameter's state from the parts of the ranks, in their order.

    on_device : whether the optimiser's kernels want the state's numbers on the GPU, too.
    """
    first = parts[0]
    if not isinstance(first, Tensor):
        return first
    if name in _NUMBERS:
        return first.to(parameter.device) if on_device else first
    flat = torch.cat(parts).to(parameter.device)
    return flat.as_strided(parameter.shape, parameter.stride())
