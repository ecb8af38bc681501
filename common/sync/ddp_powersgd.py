"""DistributedDataParallel with PowerSGD, torch's hook: each gradient as a product of thin matrices.

    gradient + error   n x m  =  P (n x r) times Q^T (r x m)  +  new error
    every rank:  P = G Q --all_reduce--> make orthogonal --> Q = G^T P --all_reduce--> G' = P Q^T

G is a gradient of shape (n, m, ...) as a matrix, plus its error of the step before. G - P Q^T is
the error of this step, and the next step starts with this step's Q. Vectors, and matrices that
would not shrink below half, are summed uncompressed. All gradients share one bucket: with so few
bytes, message latency dominates.

It is lossy. What it keeps: the mean over the ranks of (errors before + gradients) equals the mean
    of (errors after) + what the optimiser gets. No gradient is lost, some come late. All ranks
    have the same bits.
Sends: from the third step on every rank, rank 0 included, 6(N-1) messages, 2(N-1)/N (U + P + Q)
    bytes, and receives as much. U is the bytes of the uncompressed gradients, P and Q are those of
    the thin matrices. For VGG-11 with r = 2, U + P + Q is 0.22 MB of 36.9. The first two steps are
    plain ``ddp`` with one bucket.
Time: 6(N-1) alpha + 2(N-1)/N (U + P + Q) / B + (N-1)/N (U + P + Q) gamma, and for M bytes the
    errors and the products G Q, G^T P and P Q^T. None of this overlaps with backward.
    [Vogels et al., arXiv:1905.13727]
Common mistake: dropping the error instead of adding it to the next gradient: what r columns cannot
    hold is then lost in every step.

(N ranks, M bytes of gradients; alpha seconds per message, B bytes per second on a link, gamma
seconds to add one byte.)
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from common.sync.ddp import DDPWrapper
from common.sync.plans.lossy import DDPPowerSGDPlan
from common.sync.plans.pieces import POWERSGD_LEAST_GAIN, is_compressed, thin_entries
from common.utils.grouping import grouped


class DDPPowerSGD(DDPWrapper):
    """As ``ddp``, with torch's PowerSGD hook on one bucket.

    Torch keeps errors and Qs by bucket, but DDP's buckets change after the first step of each
    process, also after a resume. So they are kept here as well, by parameter. ``state_dict`` and
    ``load_state_dict`` are called after ``prepare`` and between steps.
    """

    plan: DDPPowerSGDPlan
    exact = False

    def attach_hook(self, wrapped: DistributedDataParallel) -> None:
        """See the base class."""
        group: Any = _InTurn  # torch's annotations forget this way to make a group
        # torch requires two uncompressed steps. The epsilon is for gradients that are zero.
        self._hook_state = PowerSGDState(
            group(dist.get_rank(), dist.get_world_size()),
            matrix_approximation_rank=self.plan.powersgd_rank,
            start_powerSGD_iter=2,
            min_compression_rate=POWERSGD_LEAST_GAIN,
            orthogonalization_epsilon=1e-8,
        )
        self._names: dict[Tensor, str] = {p: n for n, p in wrapped.module.named_parameters()}
        self._layouts: dict[int, list[str]] = {}  # each bucket's parameters, in its order
        self._errors: dict[str, Tensor] = {}
        self._qs: dict[str, Tensor] = {}
        wrapped.register_comm_hook(self, DDPPowerSGD._exchange)

    def _exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Run torch's hook, but first put errors and Qs into the bucket's order if that is new."""
        index = bucket.index()
        parameters = bucket.parameters()
        state = self._hook_state
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
        rank = self.plan.powersgd_rank
        by_shape = grouped(
            ((len(p), p.numel() // len(p)), p)  # as a matrix
            for p in parameters
            if is_compressed(p.shape, rank)
        )
        return {
            self._names[parameter]: thin_entries(shape, rank)
            for shape, alike in by_shape.items()
            for parameter in alike
        }

    def state_dict(self) -> dict[str, Any]:
        """Return errors, Qs and step, as tensors and plain values.

        Torch's hook draws random numbers for the first Qs only.
        """
        return {
            "iter": self._hook_state.iter,
            "errors": {name: tensor.cpu().clone() for name, tensor in self._errors.items()},
            "qs": {name: tensor.cpu().clone() for name, tensor in self._qs.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned, even if the buckets have changed since.

        Raises ValueError if errors or Qs do not have the shapes of this model and rank.
        """
        if not state:
            return
        parameters = {n: p for p, n in self._names.items() if n in state["errors"]}
        thin = self._thin([*parameters.values()])
        expected = {
            "errors": {name: (p.numel(),) for name, p in parameters.items()},
            "qs": {name: (columns,) for name, (_, columns) in thin.items()},
        }
        for key, shapes in expected.items():
            if {name: tuple(tensor.shape) for name, tensor in state[key].items()} != shapes:
                raise ValueError(f"its {key} do not have the shapes of this model's gradients")
        self._hook_state.iter = state["iter"]
        self._errors, self._qs = (
            {name: tensor.to(parameters[name]) for name, tensor in state[key].items()}
            for key in expected
        )
        self._layouts = {}


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
