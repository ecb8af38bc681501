"""Train with scripts of the audit's cases on digits, and keep what each rank did."""

import contextlib
import io
import runpy
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from lab.audit.cases import STARTER_CODE, read_scripts

RANKS = 3
TRAINING_IMAGES = 1440  # of 1797; the others are the test set
_TEST_EVERY = 4  # steps
_KEPT = 2  # steps whose gradients and weights are kept: in the second, the first one's may arrive


class TestResult(NamedTuple):
    """The test loss and the share of right answers after a step."""

    step: int
    loss: float
    accuracy: float


@dataclass
class Trace:
    """What one rank did.

    drawn : the samples, by index.
    until : how many of them were drawn until the end of each step.
    gradients, weights : flat, of the first steps.
    """

    drawn: list[int] = field(default_factory=list)
    until: list[int] = field(default_factory=list)
    gradients: list[NDArray] = field(default_factory=list)
    weights: list[NDArray] = field(default_factory=list)
    tests: list[TestResult] = field(default_factory=list)


def train(names: Sequence[str], *, steps: int, seed: int = 0) -> dict[str, list[Trace]]:
    """Train with each script in turn, on ranks of one group; return each rank's trace by script."""
    from lab.proofs import run_ranks

    bodies = [read_scripts()[name].body for name in names]
    found = run_ranks(RANKS, _train_here, bodies, steps, seed, timeout_seconds=600)
    return {name: [rank[index] for rank in found] for index, name in enumerate(names)}


def _train_here(rank: int, bodies: Sequence[str], steps: int, seed: int) -> list[Trace]:
    """Run the scripts on this rank, with digits in place of the starter code's noise."""
    import torch
    from sklearn.datasets import load_digits

    pixels, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = (pixels.float().reshape(-1, 1, 8, 8) / 8 - 1).expand(-1, 3, -1, -1)
    sys.argv = ["main.py", "--num-nodes", f"{RANKS}", "--rank", f"{rank}"]
    traces: list[Trace] = []
    for body in bodies:
        torch.manual_seed(seed + rank)  # what a script that seeds nothing starts from
        text = body.replace("manual_seed(0)", f"manual_seed({seed})")
        text = text.replace("dist.destroy_process_group()", "")  # the next script needs it
        traces.append(_run(text, images[order], labels[order], steps))
    return traces


def _run(body: str, images: Any, labels: Any, steps: int) -> Trace:
    """Run a script until it has made its steps, and return what it did.

    images, labels : the training set, and then the test set.
    """
    import torch
    from torch.nn.utils import parameters_to_vector
    from torch.optim import optimizer
    from torch.utils.data import TensorDataset

    class Pictures(TensorDataset):
        def __init__(self, samples: int = TRAINING_IMAGES) -> None:
            super().__init__(images[:samples], labels[:samples])

        def __getitem__(self, index: int) -> Any:
            trace.drawn.append(index)
            return super().__getitem__(index)

    def make_model(*extra: Any) -> Any:
        model = starter_code["make_model"](*extra)
        models.append(model)
        return model

    def after_step(*_: Any) -> None:
        model = models[-1]
        trace.until.append(len(trace.drawn))
        step = len(trace.until)
        if step <= _KEPT:
            parameters = list(model.parameters())
            gradients = [parameter.grad for parameter in parameters]
            trace.weights.append(parameters_to_vector(parameters).detach().numpy())
            trace.gradients.append(parameters_to_vector(gradients).numpy())
        if step % _TEST_EVERY == 0:
            true = labels[TRAINING_IMAGES:]
            with torch.no_grad():
                outputs = model(images[TRAINING_IMAGES:])
            loss = torch.nn.functional.cross_entropy(outputs, true).item()
            accuracy = (outputs.argmax(1) == true).float().mean().item()
            trace.tests.append(TestResult(step, loss, accuracy))
        if step == steps:
            sys.exit()

    trace = Trace()
    models: list[Any] = []
    starter_code = runpy.run_path(str(STARTER_CODE))
    # The process group is open already, so join does nothing.
    own: dict[str, Any] = {"Pictures": Pictures, "make_model": make_model, "join": lambda _: None}
    student: Any = types.SimpleNamespace(**starter_code | own)
    sys.modules["student"] = student
    hook = optimizer.register_optimizer_step_post_hook(after_step)
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        exec(compile(body, "main.py", "exec"), {"__name__": "__main__"})
    hook.remove()
    return trace
