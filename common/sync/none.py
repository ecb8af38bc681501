"""No synchronisation: one process sees the whole batch.

    rank 0                         no other rank

Sends: nothing: no messages, 0 bytes.
Time: 0 seconds.
Common mistake: training with it on several ranks. Each rank then trains its own model.
"""

from torch import nn
from torch.optim import Optimizer

from common.sync.base import GradientSync
from common.sync.plans.base import MessagePlan, NoSyncPlan


class NoSync(GradientSync):
    """No exchange: for a single process."""

    plan: MessagePlan = NoSyncPlan()

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Return the model as it is; there is no rank 0 to copy from."""
        return model
