"""Files of measured multi-node steps, and each row as a ``MeasuredStep``. Imports no torch.

published.csv, which comes with the project, holds measurements that others published. Its columns
are those of ``PublishedStep``.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import UserError, file_errors
from common.say import count, listed
from common.sync import STRATEGIES
from common.sync.plans.base import MessagePlan
from common.utils.atomic_files import read_regular
from common.utils.registry import choices_text
from lab.predict.calibration_file import Calibration, load_calibration, reference_path
from lab.predict.cluster import TypicalCluster
from lab.predict.common_models import evenly, model_called
from lab.predict.compute_model import LEAST_SAMPLES
from lab.predict.event_model import LARGEST_NODES
from lab.predict.fitting import MeasuredStep
from lab.predict.own_model import with_own_step
from lab.predict.priors import Beliefs
from lab.predict.scenario import MOST_RANKS_PER_NODE, Scenario
from lab.predict.tables import message_plans

_TENSORS = 50  # of a model that nobody knows
_MOST_BYTES = 10_000_000
_LARGEST = 1e9  # of any number of a row
_RDMA = re.compile(r"\b(rdma|infiniband|ib|roce(v[12])?|efa)\b", re.IGNORECASE)
_TCP = re.compile(r"\b(tcp|ipoib)\b", re.IGNORECASE)
_NUMBERS = {
    "grad_megabytes": "MB of gradients",
    "ranks_per_node": "ranks on each node",
    "nodes": "nodes",
    "batch_per_rank": "samples of a rank",
    "one_rank_batch": "samples of the step of one rank",
    "one_rank_step_s": "seconds of the step of one rank",
    "measured_step_s": "seconds of the measured step",
}
_PERHAPS = {
    "rate_gbit": "Gbit/s of a node's link, or nothing",
    "one_node_step_s": "seconds of the step of one node, or nothing",
}
_MOST = {"nodes": LARGEST_NODES, "ranks_per_node": MOST_RANKS_PER_NODE}
_TEXTS = ("group", "model", "transport", "software", "strategy")


@dataclass(frozen=True)
class PublishedStep:
    """A row: one measured step, and what was published about the cluster.

    columns : all of the row's columns as they stand in the file. rate_gbit : nominal, of a node's
    link; None: not stated. one_rank_step_s : of one rank alone, with ``one_rank_batch`` samples.
    one_node_step_s : of one node with all its ranks, with ``batch_per_rank`` samples each.
    """

    columns: Mapping[str, str]
    group: str
    model: str
    grad_megabytes: float
    ranks_per_node: int
    nodes: int
    rate_gbit: float | None
    transport: str
    software: str
    strategy: str
    batch_per_rank: float
    one_rank_batch: float
    one_rank_step_s: float
    one_node_step_s: float | None
    measured_step_s: float

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def backend(self) -> str:
        """Gloo, if the software says so, or runs on CPUs; else NCCL."""
        software = self.software.lower()
        on_cpus = "cpu" in software and "nccl" not in software
        return "gloo" if on_cpus or "gloo" in software else "nccl"

    @property
    def by_rdma(self) -> bool:
        """Whether messages go by InfiniBand, RoCE or the like, and not by TCP over such links."""
        if self.backend == "gloo" or _TCP.search(self.transport):
            return False
        return _RDMA.search(self.transport) is not None

    @property
    def setting(self) -> tuple[object, ...]:
        """All that rows have in common which differ in the strategy alone."""
        return (
            *(self.group, self.model, self.software, self.transport, self.rate_gbit),
            *(self.grad_megabytes, self.batch_per_rank, self.nodes, self.ranks_per_node),
        )

    @property
    def own_seconds(self) -> float:
        """The step of one rank at this row's batch, if it takes half as long for half as many."""
        return self.one_rank_step_s * self.batch_per_rank / self.one_rank_batch

    @property
    def numbers(self) -> dict[str, float | None]:
        """The columns that are numbers."""
        return {name: getattr(self, name) for name in (*_NUMBERS, *_PERHAPS)}

    def cell(self, beliefs: Beliefs) -> MeasuredStep:
        """Return the row as a step to predict."""
        # Batches are whole numbers, but a mean of 21.3 of 64 samples is 21 of 63.
        samples = max(LEAST_SAMPLES, round(self.batch_per_rank))
        step_samples = samples * self.one_rank_batch / self.batch_per_rank
        step_seconds = self.one_rank_step_s
        node_step = None
        if self.ranks_per_node > 1 and self.one_node_step_s is not None:
            step_samples = samples
            step_seconds = self.own_seconds
            # A node's step that is shorter than that of one rank was measured by somebody else.
            node_step = max(self.one_node_step_s, step_seconds)
        own = with_own_step(_reference(), step_seconds, step_samples)
        nbytes = 1e6 * self.grad_megabytes
        model = model_called(self.model, nbytes) or evenly(nbytes / 4, _TENSORS)
        scenario = Scenario(
            calibration=model.of(own, nbytes),
            batch_size=samples,
            scaling="weak",
            rate_bits=None if self.rate_gbit is None else 1e9 * self.rate_gbit,
            ranks_per_node=self.ranks_per_node,
            own_nodes=True,
            cluster=TypicalCluster.of(self.backend, "rdma" if self.by_rdma else "tcp", beliefs),
            step_seconds=step_seconds,
            step_samples=step_samples,
            node_step_seconds=node_step,
        )
        return MeasuredStep(scenario, _plan(self.strategy), self.nodes, self.measured_step_s)


@cache
def _reference() -> Calibration:
    return load_calibration(reference_path())


@cache
def _plan(strategy: str) -> MessagePlan:
    return message_plans([strategy])[strategy]


def published_path() -> Path:
    """Return the measurements that come with the project."""
    return Path(__file__).with_name("published.csv")


def read_published(path: Path) -> list[PublishedStep]:
    """Return the rows of a file of measurements. Lines that begin with # do not count.

    Raises UserError if the file is none, or if a value cannot be, with its row.
    """
    with file_errors(f"--validate: {path} cannot be read", ": give a CSV file of measurements"):
        text = read_regular(path, most_bytes=_MOST_BYTES).decode("utf-8-sig")
    lines = [line for line in io.StringIO(text, newline=None) if not line.startswith("#")]
    try:
        header, *found = csv.reader(lines, skipinitialspace=True) if lines else [[]]
    except csv.Error as error:
        raise UserError(f"--validate: {path} is not a CSV file ({error})") from error
    if not any(header):
        raise UserError(f"--validate: {path} is empty: give a CSV file of measurements")
    _check_header(path, header)
    rows = []
    for number, values in enumerate(found, 1):
        if any(values):  # a spreadsheet leaves lines without values
            rows.append(_row(header, values, f"--validate: {path}, row {number} below the header"))
    if not rows:
        raise UserError(f"--validate: {path} has no rows: give at least one measured step")
    return rows


def _check_header(path: Path, header: Sequence[str]) -> None:
    names = (*_TEXTS, *_NUMBERS, *_PERHAPS)
    missing = [name for name in names if name not in header]
    if not missing:
        return
    advice = f"give the columns of {published_path().name}, which comes with the project"
    if len(missing) == len(names):
        for separator in (";", "\t"):
            if separator in "".join(header):
                advice = f"columns are separated by {separator!r}, save the file with commas"
    raise UserError(f"--validate: {path} has no column {listed(missing)}: {advice}")


def _row(header: Sequence[str], values: Sequence[str], where: str) -> PublishedStep:
    if len(values) != len(header):
        raise UserError(
            f"{where} has {count(len(values), 'value')} for {len(header)} columns: it is cut off, "
            "or a text with a comma lacks quotation marks"
        )
    columns = dict(zip(header, map(str.strip, values), strict=True))
    strategy = columns["strategy"]
    if strategy not in STRATEGIES:
        raise UserError(
            f"{where}: strategy: got {strategy!r}, {choices_text(strategy, STRATEGIES)}"
        )
    numbers = {name: _number(columns, name, where) for name in _NUMBERS}
    perhaps = {name: _number(columns, name, where) if columns[name] else None for name in _PERHAPS}
    counts = {name: _whole(numbers.pop(name), name, where) for name in _MOST}
    texts = {name: columns[name] for name in _TEXTS}
    for name, text in texts.items():
        if not text.isprintable():
            raise UserError(f"{where}: {name}: got {text!r}, give a text that can be printed")
    typed: dict[str, Any] = {**texts, **numbers, **perhaps, **counts}
    return PublishedStep(columns=columns, **typed)


def _number(columns: Mapping[str, str], name: str, where: str) -> float:
    """Return a positive number of a column."""
    text = columns[name]
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < _LARGEST:
        meaning = f"{_NUMBERS[name]}, more than 0" if name in _NUMBERS else _PERHAPS[name]
        raise UserError(f"{where}: {name}: got {text!r}, give {meaning}")
    return value


def _whole(value: float, name: str, where: str) -> int:
    if value != round(value) or value > _MOST[name]:
        raise UserError(f"{where}: {name}: got {value:g}, give 1 to {_MOST[name]:,}")
    return round(value)
