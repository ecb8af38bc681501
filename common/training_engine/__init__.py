"""The only training step, epoch loop and prediction loop of the project."""

from common.training_engine.engine import EpochResult, StepRecord, TrainingEngine
from common.training_engine.prediction import Predictions, predict

__all__ = ["EpochResult", "Predictions", "StepRecord", "TrainingEngine", "predict"]
