"""Random states of the page of ``lab whatif``, with their rows by ``lab predict``.

``shared_pages`` makes them once a session: ``pages`` makes the pages' data, ``add_states`` random
states, ``add_rows`` lets `lab predict --json` compute them in this process. ``in_node`` computes
with the page's scripts, and ``differences`` compares the two.
"""

import contextlib
import fcntl
import io
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from common.sync import STRATEGIES
from lab.cli import build_parser
from lab.predict import event_model
from lab.predict.calibration_file import Calibration, load_calibration, reference_path
from lab.predict.cluster import GENERATIONS
from lab.predict.compute_model import ComputeProfile
from lab.predict.scenario import Scenario
from lab.predict.tables import PredictedStep, message_plans, predict_table
from lab.whatif.data import page_data
from tests.helpers.node import run_scripts

RELATIVE = 1e-9
_SEED = 46
_CALLS = (
    "given.calls.map(([name, ...rest]) => ({...Engine, ...Timeline})[name](given.data, ...rest))"
)
_LIMIT = 240.0  # seconds in node
_FLAGS = {
    "gradient_type": "--gradient-type",
    "scaling": "--scaling",
    "batch_size": "--batch-size",
    "nodes": "--nodes",
    "bucket_mb": "--bucket-mb",
}
_WITH_UNITS = {
    "rate_gbit": ("--rate", "gbit"),
    "inside_gbit": ("--rate-inside", "gbit"),
    "latency_us": ("--latency", "us"),
}

State = dict[str, Any]


@dataclass
class Page:
    """A page's data, its calibration file, states, and for each its row of ``lab predict``."""

    data: dict[str, Any]
    calibration: str  # its path
    states: list[State] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)


def pages(folder: Path) -> list[Page]:
    """Return a page with the calibration that comes with the project, and one with another.

    The other's ranks were on several machines, its network has every kind of cost, and its model
    has no gradients in BatchNorm's layers.
    """
    reference = load_calibration(reference_path())
    found = []
    for name, calibration in (("reference", reference), ("other", _other(reference))):
        path = folder / f"{name}.json"
        calibration.save(path)
        # Through JSON, as in the page.
        data = json.loads(json.dumps(page_data(calibration), allow_nan=False))
        found.append(Page(data, str(path)))
    return found


def _other(reference: Calibration) -> Calibration:
    network = reference.network
    kinds = {
        kind: replace(rate, floor_seconds=4e-4 * place, start_seconds=1e-4 * place)
        for place, (kind, rate) in enumerate(network.kinds.items())
    }
    one, two = reference.compute.profiles
    eight = ComputeProfile(8, 1, 0.02, 0.012, 0.05, 0.03, 0.09)
    return replace(
        reference,
        model="resnet18",
        ranks=16,
        ranks_here=4,
        batchnorm=(),
        network=replace(network, kinds=kinds, overlap_cost=0.4),
        compute=replace(reference.compute, profiles=(one, two, eight)),
    )


def shared_pages(
    base: Path, count: int, *, sampled_ranks: int = event_model.SAMPLED_RANKS
) -> list[Page]:
    """Return ``pages`` with ``count`` states and their rows, made once for all of pytest's workers.

    base : a folder that they share, ``shared_folder``. sampled_ranks : whose bytes are counted in
        the mean over the ranks but the first; that takes Python more time than all else.
    """
    path = base / f"whatif-{count}.json"
    with (base / f"whatif-{count}.lock").open("a") as turn:
        fcntl.lockf(turn, fcntl.LOCK_EX)
        if not path.exists():
            with patch.object(event_model, "SAMPLED_RANKS", sampled_ranks):
                made = pages(base)
                for place, page in enumerate(made):
                    share = count // len(made)
                    add_states(page, share, seed=_SEED + place, first=place * share)
                    add_rows(page)
            path.write_text(json.dumps([asdict(page) for page in made]))
    return [Page(**content) for content in json.loads(path.read_text())]


def shared_folder(factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return a folder of this session that all of pytest-xdist's workers share."""
    base = factory.getbasetemp()
    return base if worker_id == "master" else base.parent


def add_states(page: Page, count: int, *, seed: int, first: int = 0) -> None:
    """Add random states; their ``focus`` goes through all strategies, from the first one on."""
    dice = random.Random(seed)
    names = list(STRATEGIES)
    for index in range(count):
        state = _random_state(page, dice)
        state["focus"] = names[(first + index) % len(names)]
        other = dice.choice([state["focus"], *names])
        state["strategies"] = list(dict.fromkeys([state["focus"], other]))
        page.states.append(state)


def _random_state(page: Page, dice: random.Random) -> State:
    own = page.data["calibration"]["model"]
    costs = dice.choice(["typical", "typical", "calibrated"])
    models = [model["name"] for model in page.data["models"]]
    model = own
    if costs == "typical":
        model = dice.choice([own, "own", *dice.choices(models, k=3)])
    step_ms: float | None = _spread(dice, 1, 5000)
    if costs == "calibrated" or (model == own and dice.random() < 0.5):
        step_ms = None
    backend = dice.choice(["gloo", "nccl", "nccl"])
    transport = dice.choice(GENERATIONS["tcp"])
    if backend == "nccl" and dice.random() < 0.6:
        transport = dice.choice(GENERATIONS["rdma"])
    software_gbit = dice.choice([None, None, _spread(dice, 1, 3000)])
    adapters = None
    if costs == "typical" and software_gbit is None and transport != "rdma-gpudirect":
        adapters = dice.choice([None, 1, 2, 8])
    ranks_per_node = dice.choice([1, 1, 2, 3, 4, 8, 16, 64])
    return {
        "model": model,
        "parameters": round(_spread(dice, 1, 1e12)),
        "gradient_type": dice.choice(["fp32", "fp32", "fp16", "bf16"]),
        "costs": costs,
        "backend": backend,
        "transport": transport,
        "adapters": adapters,
        "software_gbit": software_gbit if costs == "typical" else None,
        "rate_gbit": _spread(dice, 0.05, 3200),
        "inside_gbit": dice.choice([None, _spread(dice, 1, 5000)]),
        "latency_us": dice.choice([None, _spread(dice, 1, 5000)]),
        "step_ms": step_ms,
        "batch": dice.choice([1, 2, round(_spread(dice, 1, 1024))]),
        "scaling": dice.choice(["strong", "weak"]),
        "batch_size": round(_spread(dice, 2, 4096)),
        "nodes": dice.choice([1, 2, 3, 4, round(_spread(dice, 1, 4096))]),
        "ranks_per_node": ranks_per_node,
        "bucket_mb": dice.choice([None, None, _spread(dice, 0.05, 100)]),
        "measured": None,
        "least_efficiency": None,
        "most_step_ms": None,
    }


def _spread(dice: random.Random, least: float, most: float) -> float:
    """Return a number of three digits; every power of ten is as likely as another."""
    return float(f"{math.exp(dice.uniform(math.log(least), math.log(most))):.3g}")


def command_of(state: State, calibration: str) -> list[str]:
    """Return the arguments of `lab predict` that a state stands for, its focus first."""
    given = ["predict", "--json", "--calibration", calibration]
    if state["model"] == "own":
        given += ["--parameters", str(state["parameters"])]
    else:
        given += ["--model", state["model"]]
    if state["costs"] == "typical":
        given += ["--backend", state["backend"], "--transport", state["transport"]]
        for name, flag in (("adapters", "--adapters"), ("software_gbit", "--software-gbit")):
            if state[name] is not None:
                given += [flag, str(state[name])]
    if state["step_ms"] is not None:
        given += ["--step-time", f"{state['step_ms']}ms", "--batch", str(state["batch"])]
    if state["ranks_per_node"] > 1:
        given += ["--ranks-per-node", str(state["ranks_per_node"])]
    for name, (flag, unit) in _WITH_UNITS.items():
        if name == "inside_gbit" and state["ranks_per_node"] == 1:
            continue
        if state[name] is not None:
            given += [flag, f"{state[name]}{unit}"]
    for name, flag in _FLAGS.items():
        if state[name] is not None:
            given += [flag, str(state[name])]
    focus = state["focus"]
    others = [name for name in state["strategies"] if name != focus]
    return [*given, "--sync", focus, *others]


def add_rows(page: Page) -> None:
    """Compute each state's row by `lab predict --json`, without where scaling stops."""
    for state in page.states[len(page.rows) :]:
        page.rows.append(row_of(command_of(state, page.calibration)))


def scenario_of(state: State, calibration: str | Path) -> Scenario:
    """Return what `lab predict` predicts with the command that a state stands for."""
    args = _parser().parse_args(command_of(state, str(calibration)))
    with patch("lab.predict.cli._show") as shown:
        assert args.run(args) == 0
    _, _, [scenario], *_ = shown.call_args.args
    return scenario


def steps_of(
    state: State, strategies: Sequence[str], calibration: str | Path
) -> list[PredictedStep]:
    """Return a row of `lab predict` for each of these strategies in a state."""
    options = {"bucket_mb": state["bucket_mb"], "ranks_per_node": state["ranks_per_node"]}
    plans = message_plans(strategies, options)
    return predict_table([state["nodes"]], plans, scenario_of(state, calibration))


@cache
def _parser() -> Any:
    return build_parser()


def row_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the first row of `lab predict`, its prediction's numbers among the others."""
    printed = io.StringIO()
    limits = patch("lab.predict.tables.scaling_limits_of", return_value=[])  # slow, and not shown
    args = _parser().parse_args(arguments)
    with limits, contextlib.redirect_stdout(printed):
        assert args.run(args) == 0
    row = json.loads(printed.getvalue())["rows"][0]
    prediction = row.pop("prediction")
    return row | prediction


def differences(page: Page, computed: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each number of a row that JavaScript computed otherwise."""
    assert len(computed) == len(page.rows)
    found = []
    for state, expected, row in zip(page.states, page.rows, computed, strict=True):
        for name, value in row.items():
            least = 1e-12 * expected["step_seconds"] if name.endswith("_seconds") else 0.0
            if not _equal(value, expected[name], least):
                command = " ".join(command_of(state, page.calibration))
                found.append(f"{name}: {value}, not {expected[name]}: lab {command}")
    return found


def _equal(value: Any, expected: Any, least: float) -> bool:
    if isinstance(expected, dict):
        same_keys = value.keys() == expected.keys()
        return same_keys and all(_equal(value[key], expected[key], least) for key in expected)
    if isinstance(expected, list):
        pairs = zip(value, expected, strict=True)
        return all(_equal(first, second, least) for first, second in pairs)
    if isinstance(expected, str):
        return value == expected
    return math.isclose(value, expected, rel_tol=RELATIVE, abs_tol=least)


def in_node(data: dict[str, Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
    """Return what the page computes: each call names a function of Engine or Timeline.

    Its arguments follow, the page's data before them. Needs node.
    """
    given = {"data": data, "calls": calls}
    return run_scripts(_CALLS, given, limit=_LIMIT)


def rows_in_node(page: Page) -> list[dict[str, Any]]:
    """Return the row of each state's focus by engine.js."""
    return in_node(page.data, [["row", state, state["focus"]] for state in page.states])
