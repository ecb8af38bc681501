"""DistributedDataParallel with torch's ``ZeroRedundancyOptimizer``: a rank updates some parameters.

    backward   ####################################
    bucket 1            ========                      all_reduce, as in ddp.py
    bucket 2                        ==============
    update                                            ##     a rank's own parameters only
    broadcast                                           =====  of each rank's share, to all others

Every parameter belongs to one rank, which alone keeps its optimiser state, about 1/N of all. Every
rank gets the whole mean gradient, as in ddp.py, and after the update the new weights of each share.
sharded.py sends half as much for the gradients, and hides the weights behind the next forward pass.

The training's own optimiser keeps its settings, but updates nothing: its ``step`` copies them into
    the ``ZeroRedundancyOptimizer`` and steps that one. ``sync_replicas`` gathers the state into the
    own optimiser; the next step takes it away again.
Sends: 2(N-1)/N M bytes a rank for the gradients, then N broadcasts, of about M/N bytes each; in a
    broadcast over a tree the owner sends its share up to log2(N) times, other ranks pass it on.
    All ranks together send (N-1) M bytes for the weights, as in an all_gather.
Time: as ddp.py, and N broadcasts that nothing hides: at least (N-1)/N M / B + N alpha.
    [Rajbhandari et al., ZeRO, arXiv:1910.02054, stage 1]
Common mistake: ``state_dict`` of each rank's own part in a checkpoint: then nobody else's is saved.

(N ranks, M bytes of gradients; alpha seconds per message, B bytes per second on a link.) The shares
are as unequal as the parameters: a rank that owns VGG-11's largest layers has more than M/N.
"""

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from common.distributed.collectives import gather_states
from common.distributed.process_group import current_world
from common.errors import UserError
from common.sync.built_in_plans import DDPZero1Plan
from common.sync.ddp import DDPWrapper

_OF_SCALER = ("grad_scale", "found_inf")  # a GradScaler leaves them at a fused optimiser


class DDPZero1(DDPZero1Plan, DDPWrapper):
    """Plain DistributedDataParallel, and a ZeroRedundancyOptimizer.

    Parameters
    ----------
    bucket_mb, find_unused_parameters : see ``DDP``.

    Raises UserError in ``prepare`` if the parameters have several types.
    """

    _zero: ZeroRedundancyOptimizer | None = None
    _hooks: Sequence[RemovableHandle] = ()
    _state_is_split = _stepped = False

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """See the base class. Every parameter becomes a view of its owner's share."""
        self.close()
        self._optimizer = optimizer
        groups = [
            {**group, "params": [p for p in group["params"] if p.requires_grad]}
            for group in optimizer.param_groups
        ]
        types = {p.dtype for group in groups for p in group["params"]}
        if len(types) > 1:
            raise UserError(
                f"ddp_zero1: the parameters have the types {', '.join(sorted(map(str, types)))}, "
                "but ZeroRedundancyOptimizer wants one: choose another strategy"
            )
        taken = inspect.signature(type(optimizer)).parameters
        self._zero = ZeroRedundancyOptimizer(
            groups,
            optimizer_class=type(optimizer),
            parameters_as_bucket_view=True,
            **{name: value for name, value in optimizer.defaults.items() if name in taken},
        )
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._step()),
            optimizer.register_state_dict_pre_hook(lambda _: self._gather_state()),
        ]
        return super().prepare(model, optimizer)

    def after_step(self, model: nn.Module) -> None:
        """Send the weights also if the optimiser made no step: its layers may be emulated."""
        if not self._stepped:
            self._drop_gradients()
            self._step()
        self._stepped = False

    def sync_replicas(self, model: nn.Module) -> None:
        """Gather the optimiser's state. The next step splits it again."""
        self._gather_state()

    def close(self) -> None:
        """Remove the hooks. Optimiser state that ``sync_replicas`` has not gathered is lost."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._zero = [], None

    def _step(self) -> None:
        """Update this rank's parameters, exchange all, and leave the own optimiser no gradient."""
        zero, optimizer = self._zero, self._optimizer
        assert zero is not None, "prepare comes first"
        self._split_state()
        for own, group in zip(optimizer.param_groups, zero.param_groups, strict=True):
            group.update({name: value for name, value in own.items() if name != "params"})
        for name in _OF_SCALER:
            setattr(zero.optim, name, getattr(optimizer, name, None))
        with ExitStack() as stack:
            # What follows the update of this rank's own parameters is communication.
            hook = zero.optim.register_step_post_hook(
                lambda *_: stack.enter_context(self.waiting())
            )
            stack.callback(hook.remove)
            zero.step()
        self._drop_gradients()
        self._stepped = True

    def _drop_gradients(self) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _split_state(self) -> None:
        """Move this rank's part of the state from the own optimiser, and drop the rest."""
        zero, whole = self._zero, self._optimizer.state
        assert zero is not None
        if whole:  # gathered, or from a checkpoint
            owned = {p for group in zero.optim.param_groups for p in group["params"]}
            zero.optim.state.clear()
            zero.optim.state.update({p: entry for p, entry in whole.items() if p in owned})
            whole.clear()
        self._state_is_split = True

    def _gather_state(self) -> None:
        """Give the own optimiser the whole state. Collective, unless it has it."""
        if self._zero is None or not self._state_is_split:
            return
        self._state_is_split = False
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        index = {p: str(i) for i, p in enumerate(parameters)}
        mine: dict[str, Any] = {index[p]: one for p, one in self._zero.optim.state.items()}
        by_rank = gather_states(current_world(parameters[0].device), mine)
        state = {int(i): one for states in by_rank for i, one in states.items()}
        # torch puts each tensor on the device that the optimiser wants.
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
        self._zero.optim.state.clear()
