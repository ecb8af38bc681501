"""What PowerSGD keeps from step to step, by parameter: torch keeps it by bucket, and DDP's buckets change after its first
step, which after a resume is in the middle of a training.

``arrange`` before each call of torch's hook; ``state_dict`` and ``load_state_dict`` between steps.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from common.sync.bucket_plans import POWERSGD_LEAST_GAIN, is_compressed, thin_entries


class _InTurn(dist.ProcessGroup):
    """The group that is open, whose all_reduces are over when they return.

    Torch's hook starts its second and third message when the one before ends, with Gloo in one of Gloo's own threads, and
    waits there: with several buckets in another order on each rank, or for ever. So it all happens in the thread of backward.
    """

    def allreduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Return the work, done."""
        assert dist.group.WORLD is not None, "the process group is open"
        work = dist.group.WORLD.allreduce(*args, **kwargs)
        work.wait()
        return work


class PerParameterState:
    """Torch's ``state``, and the way from its buckets to parameters and back.

    Parameters
    ----------
    rank : columns of the thin matrices.
    """

    def __init__(self, model: nn.Module, *, rank: int) -> None:
        # Two steps is the least that torch permits. A gradient may be zero, which needs an epsilon.
        group = _InTurn(dist.get_rank(), dist.get_world_size())
        self.state = PowerSGDState(
            group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            min_compression_rate=POWERSGD_LEAST_GAIN,
            orthogonalization_epsilon=1e-8,
        )
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._device = next(model.parameters()).device
        self._layouts: dict[int, list[str]] = {}
        self._errors: dict[str, Tensor] = {}
        self._qs: dict[str, Tensor] = {}

    def arrange(self, bucket: dist.GradBucket) -> None:
        """Bring errors and Qs into the order in which this bucket now holds its parameters."""
        if self.state.iter < self.state.start_powerSGD_iter:
            return
        index, names = bucket.index(), [self._names[p] for p in bucket.parameters()]
        if self._layouts.get(index, names) != names:
            self._errors, self._qs = self._by_parameter()
            self._layouts = {}
        if index not in self._layouts and all(name in self._errors for name in names):
            thin, empty = self._thin(names), bucket.buffer().new_empty(0)
            self.state.error_dict[index] = torch.cat([self._errors[name] for name in names])
            self.state.p_memory_dict[index] = empty.new_empty(sum(p for p, _ in thin.values()))
            self.state.q_memory_dict[index] = torch.cat([empty, *(self._qs[name] for name in thin)])
        self._layouts[index] = names

    def _thin(self, names: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return the entries of each P and Q, in torch's order: matrices of one shape follow one another."""
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name in names:
            shape = self._shapes[name]
            if is_compressed(shape, self.state.matrix_approximation_rank):
                by_shape.setdefault((shape[0], math.prod(shape[1:])), []).append(name)
        return {
            name: thin_entries(shape, self.state.matrix_approximation_rank)
            for shape, alike in by_shape.items()
            for name in alike
        }

    def _by_parameter(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        errors, qs = dict(self._errors), dict(self._qs)
        for index, names in self._layouts.items():
            if index in self.state.error_dict:
                sizes, thin = [math.prod(self._shapes[name]) for name in names], self._thin(names)
                errors |= zip(names, self.state.error_dict[index].split(sizes), strict=True)
                qs |= zip(
                    thin,
                    self.state.q_memory_dict[index].split([q for _, q in thin.values()]),
                    strict=True,
                )
        return errors, qs

    def state_dict(self) -> dict[str, Any]:
        """Return it as tensors and plain values, by parameter."""
        errors, qs = self._by_parameter()
        random = self.state.rng.get_state(legacy=False)
        generator = random["state"]
        return {
            "iter": self.state.iter,
            "random": [
                generator["key"].tolist(),
                generator["pos"],
                random["has_gauss"],
                random["gauss"],
            ],
            "errors": {name: tensor.cpu().clone() for name, tensor in errors.items()},
            "qs": {name: tensor.cpu().clone() for name, tensor in qs.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back; the buckets may be others."""
        if state:
            self.state.iter = state["iter"]
            keys, *rest = state["random"]
            self.state.rng.set_state(("MT19937", keys, *rest))
            self._errors, self._qs = (
                {name: tensor.to(self._device) for name, tensor in state[key].items()}
                for key in ("errors", "qs")
            )
            self._layouts = {}
