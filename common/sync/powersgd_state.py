"""PowerSGD's state between steps (errors and Qs), kept by parameter.

Torch keeps it by bucket, but DDP's buckets change after the first step of each process, also after
a resume. ``exchange`` is the hook. ``state_dict`` and ``load_state_dict`` are called between steps.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from common.sync.bucket_plans import POWERSGD_LEAST_GAIN, is_compressed, thin_entries
from common.utils.grouping import grouped


class _InTurn(dist.ProcessGroup):
    """The default process group, with all_reduces that block until they are done.

    Torch's hook starts its second and third message when the previous one ends. With Gloo, this
    happens in one of Gloo's own threads, which then blocks. With several buckets the order may
    then differ between ranks, or the threads deadlock. Here everything runs in backward's thread.
    """

    def allreduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Return the work, done."""
        assert dist.group.WORLD is not None, "the process group is open"
        work = dist.group.WORLD.allreduce(*args, **kwargs)
        work.wait()
        return work


class PerParameterState:
    """Torch's PowerSGD hook, with a copy of its errors and Qs by parameter.

    Parameters
    ----------
    rank : columns of the thin matrices.
    """

    def __init__(self, model: nn.Module, *, rank: int) -> None:
        group: Any = _InTurn  # torch's annotations forget this way to make a group
        # torch requires two uncompressed steps. The epsilon is for gradients that are zero.
        self._hook_state = PowerSGDState(
            group(dist.get_rank(), dist.get_world_size()),
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            min_compression_rate=POWERSGD_LEAST_GAIN,
            orthogonalization_epsilon=1e-8,
        )
        self._rank = rank
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._layouts: dict[int, list[str]] = {}  # each bucket's parameters, in its order
        self._errors: dict[str, Tensor] = {}
        self._qs: dict[str, Tensor] = {}

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Run torch's hook, but first put errors and Qs into the bucket's order if that is new."""
        index, parameters, state = bucket.index(), bucket.parameters(), self._hook_state
        names = [self._names[p] for p in parameters]
        thin = self._thin(parameters)
        if self._layouts.get(index) != names and all(name in self._errors for name in names):
            empty = bucket.buffer().new_empty(0)
            state.error_dict[index] = torch.cat([self._errors[name] for name in names])
            state.p_memory_dict[index] = empty.new_empty(sum(p for p, _ in thin.values()))
            state.q_memory_dict[index] = torch.cat([empty, *(self._qs[name] for name in thin)])
        self._layouts[index] = names

        future = powerSGD_hook(state, bucket)  # done when it returns, see _InTurn
        if index in state.error_dict:  # not in the first two steps; views of torch's tensors
            errors = state.error_dict[index].split([p.numel() for p in parameters])
            qs = state.q_memory_dict[index].split([q for _, q in thin.values()])
            self._errors |= zip(names, errors, strict=True)
            self._qs |= zip(thin, qs, strict=True)
        return future

    def _thin(self, parameters: Sequence[Tensor]) -> dict[str, tuple[int, int]]:
        """Return the entries of each P and Q, in torch's order: equal shapes follow one another."""
        by_shape = grouped(
            ((len(p), p.numel() // len(p)), p)  # as a matrix
            for p in parameters
            if is_compressed(p.shape, self._rank)
        )
        return {
            self._names[parameter]: thin_entries(shape, self._rank)
            for shape, alike in by_shape.items()
            for parameter in alike
        }

    def _check_shapes(self, state: dict[str, Any]) -> None:
        parameters = [p for p, name in self._names.items() if name in state["errors"]]
        thin, dtypes = self._thin(parameters), {self._names[p]: p.dtype for p in parameters}
        expected = {
            "errors": {self._names[p]: p.numel() for p in parameters},
            "qs": {name: q for name, (_, q) in thin.items()},
        }
        for key, sizes in expected.items():
            found = {name: (tuple(t.shape), t.dtype) for name, t in state[key].items()}
            if found != {name: ((size,), dtypes[name]) for name, size in sizes.items()}:
                raise ValueError(f"its {key} do not have the shapes of this model's gradients")

    def state_dict(self) -> dict[str, Any]:
        """Return errors, Qs, step and random state, as tensors and plain values."""
        random = self._hook_state.rng.get_state(legacy=False)
        keys, position = random["state"]["key"].tolist(), random["state"]["pos"]
        return {
            "iter": self._hook_state.iter,
            "random": [keys, position, random["has_gauss"], random["gauss"]],
            "errors": {name: tensor.cpu().clone() for name, tensor in self._errors.items()},
            "qs": {name: tensor.cpu().clone() for name, tensor in self._qs.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned, even if the buckets have changed since.

        Raises ValueError if errors or Qs do not have the shapes of this model and rank.
        """
        if state:
            self._check_shapes(state)
            self._hook_state.iter = state["iter"]
            keys, *rest = state["random"]
            self._hook_state.rng.set_state(("MT19937", keys, *rest))
            device = next(iter(self._names)).device
            self._errors, self._qs = (
                {name: tensor.to(device) for name, tensor in state[key].items()}
                for key in ("errors", "qs")
            )
            self._layouts = {}
