"""The project's one training step, epoch loop and prediction loop, and their local launcher."""

from common.profiling.records import EpochReport, StepRecord
from common.training_engine.callbacks import (
    AfterEachStep,
    Callback,
    EpochEnd,
    Validator,
)
from common.training_engine.engine import TrainingEngine
from common.training_engine.evaluation_loop import Predictions, predict, validate
from common.training_engine.launch import (
    WorkerError,
    distributed_train_worker,
    launch_distributed_training,
)
from common.training_engine.metrics import EpochResult

__all__ = [
    "AfterEachStep",
    "Callback",
    "EpochEnd",
    "EpochReport",
    "EpochResult",
    "Predictions",
    "StepRecord",
    "TrainingEngine",
    "Validator",
    "WorkerError",
    "distributed_train_worker",
    "launch_distributed_training",
    "predict",
    "validate",
]
