"""A calibration for the reader's own model and nodes, from the time of a step on one of them."""

from dataclasses import replace

from common.errors import UserError
from common.models import MODELS
from common.utils.registry import choices_text
from lab.predict.calibration_file import LARGE_STEP, Calibration
from lab.predict.common_models import TENSORS, common_models, evenly, spread
from lab.predict.compute_model import ComputeProfile
from lab.predict.project_models import parts_of

_AS_IN_MODELS = "_cifar10"  # common models that are models of this project


def model_names() -> list[str]:
    """Return the models that a reader may name: this project's, then the common ones."""
    return [*MODELS, *(name for name in common_models() if not name.endswith(_AS_IN_MODELS))]


def usual_optimizer(model: str | None) -> str:
    """Return the optimiser of ``OPTIMIZERS`` that a model is usually trained with."""
    known = common_models().get(model or "")
    return known.optimizer if known else "momentum"


def with_own_model(
    calibration: Calibration,
    *,
    model: str | None,
    parameters: float | None,
    step_seconds: float | None,
    batch: int | None,
) -> Calibration:
    """Return the calibration with another model's gradients and compute times.

    Parameters
    ----------
    model : one of ``common.models``, or of common_models.toml; None: that of
        the calibration.
    parameters : how many a model has, in fp32 and ``TENSORS`` equal matrices, instead of
        ``model``.
    step_seconds, batch : a step of ``batch`` samples on one node. Forward, backward and update keep
        their shares of a step; the fixed part of a step keeps its share, too. On such nodes
        messages cost what their links cost: summing, copying and slowing backward down, which the
        calibrated machine's cores do, are left out.

    Raises UserError if the compute times would be those of another model.
    """
    name = calibration.model
    if model:
        name = model
    elif parameters:
        name = f"a model of {parameters:,.0f} parameters"
    _check(calibration, name, model, parameters, step_seconds, batch)
    other_model = name != calibration.model
    if step_seconds is not None and batch is not None:
        calibration = with_own_step(calibration, step_seconds, batch)
    if not other_model:
        return calibration
    if model and model not in MODELS:
        return common_models()[model].of(calibration)
    if parameters:
        return evenly(parameters, TENSORS).of(calibration)
    parts = parts_of(name)
    curve = common_models().get(name + _AS_IN_MODELS) or evenly(1, 1)
    return replace(
        calibration,
        model=name,
        gradients=parts.gradients,
        compute=spread(calibration.compute, parts.gradients, curve.ready),
        batchnorm=parts.batchnorm,
    )


def with_own_step(calibration: Calibration, step_seconds: float, batch: float) -> Calibration:
    """Return the calibration of a rank whose step of ``batch`` samples takes so long.

    Forward, backward and update have the calibrated shares of a large step, and forward and
    backward grow with the samples.
    """
    large = calibration.compute.at(LARGE_STEP)
    factor = step_seconds / large.seconds
    profile = ComputeProfile(
        ranks=1,
        threads=calibration.compute.profiles[0].threads,
        before_fixed_seconds=0.0,
        before_sample_seconds=factor * large.before_seconds / batch,
        backward_fixed_seconds=0.0,
        backward_sample_seconds=factor * large.backward_seconds / batch,
        update_seconds=factor * large.update_seconds,
    )
    return replace(calibration, compute=replace(calibration.compute, profiles=(profile,)))


def with_gradient_bytes(calibration: Calibration, itemsize: int) -> Calibration:
    """Return the calibration with gradients, and weights that are sent, of ``itemsize`` an entry.

    Compute times stay as they are.
    """
    gradients = tuple(replace(gradient, itemsize=itemsize) for gradient in calibration.gradients)
    before = sum(gradient.nbytes for gradient in calibration.gradients)
    after = sum(gradient.nbytes for gradient in gradients)
    ready_bytes = tuple(nbytes * after // before for nbytes in calibration.compute.ready_bytes)
    compute = replace(calibration.compute, ready_bytes=ready_bytes)
    return replace(calibration, gradients=gradients, compute=compute)


def _check(
    calibration: Calibration,
    name: str,
    model: str | None,
    parameters: float | None,
    step_seconds: float | None,
    batch: int | None,
) -> None:
    """Raise UserError if the flags contradict each other, or leave out the compute times."""
    if model is not None and parameters is not None:
        raise UserError("--model and --parameters are both given: give one")
    if (step_seconds is None) != (batch is None):
        raise UserError("--step-time and --batch go together: give both")
    if batch is not None and batch < 1:
        raise UserError(f"--batch: got {batch}, give 1 or more")
    if model is not None and model not in model_names():
        raise UserError(f"--model: got {model!r}, {choices_text(model, model_names())}")
    if step_seconds is None and name != calibration.model:
        advice = f"add --step-time and --batch of {name} on one of your nodes"
        if model:
            advice += f", or run lab calibrate --model {model}"
        raise UserError(f"the calibration has the compute times of {calibration.model}: {advice}")
