"""Helpers for tests: real ranks, programs as users start them, images, and waits with a limit."""

from lab.proofs.ranks import PRELOADED, RankError, run_ranks
from tests.helpers.images import make_image_folder
from tests.helpers.paths import CIFAR, ROOT, needs_cifar10, needs_cifar100
from tests.helpers.processes import (
    TINY,
    Ended,
    Started,
    free_port,
    kill_started,
    only_run_folder,
    run_part,
    start_lab,
    start_part,
    start_ranks,
    user_environment,
)
from tests.helpers.waiting import LONG, wait_until

PRELOADED[:] = [
    "tests",
    *PRELOADED,
    "common.experiment.run",
    "common.sync.fsdp",
    "common.sync.ddp_zero1",
    "common.reporting.plots",
    "sklearn.datasets",
    "tests.helpers.tiny_model",
    "tests.helpers.audited",
    *map("lab.audit.probe.{}".format, "clocks collectives data optimizers passes stopping".split()),
    "tests.helpers.frozen",
]

__all__ = [
    "CIFAR",
    "LONG",
    "ROOT",
    "TINY",
    "Ended",
    "RankError",
    "Started",
    "free_port",
    "kill_started",
    "make_image_folder",
    "needs_cifar10",
    "needs_cifar100",
    "only_run_folder",
    "run_part",
    "run_ranks",
    "start_lab",
    "start_part",
    "start_ranks",
    "user_environment",
    "wait_until",
]
