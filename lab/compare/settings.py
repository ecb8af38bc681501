"""The settings of a comparison, checked when they are made."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from common.config.schema import flag
from common.errors import UserError
from common.sync import build_message_plan_from
from lab.predict.variants import option_parsers, split_variant
from lab.units import parse_rate

_MOST = 10**6


@dataclass(frozen=True)
class Settings:
    """What a comparison measures. An interrupted comparison resumes if its settings are equal.

    "ddp-auto" or "ddp-9" in ``sync`` is ddp with that --bucket-mb. ``batch_size`` is global with
    "strong" scaling, per rank with "weak". ``steps`` are measured after ``warmup`` other steps.
    With ``until_accuracy`` each of ``seeds`` trains once, for at most ``epochs`` epochs; otherwise
    the first seed trains ``repeats`` times. ``rates`` are link rates such as "200mbit", each on its
    own cluster; None is loopback. ``ranks_per_node`` share a node's link; a single node runs one
    rank in any case. ``compute`` is "real" or a profile of emulated compute, as for the parts.
    Every run gets ``flags`` unchanged.
    """

    nodes: tuple[int, ...]
    sync: tuple[str, ...]
    steps: int = 30
    warmup: int = 5
    repeats: int = 3
    dataset: str = "cifar10"
    model: str = "vgg11"
    batch_size: int = 256
    scaling: str = "strong"
    seeds: tuple[int, ...] = (0,)
    until_accuracy: float | None = None
    epochs: int = 20
    flags: tuple[str, ...] = ()
    rates: tuple[str | None, ...] = (None,)
    compute: str = "real"
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_ranks()
        if not self.seeds or min(self.seeds) < 0:
            found = " ".join(map(str, self.seeds)) or "nothing"
            raise UserError(f"--seed: got {found}, give whole numbers of at least 0")
        if self.until_accuracy is not None and not 0 < self.until_accuracy <= 1:
            raise UserError(
                f"--until-accuracy: got {self.until_accuracy}, give a fraction above 0 and of at "
                "most 1, e.g. 0.6"
            )
        if len(set(map(parse_rate, self.rates))) < len(self.rates):
            raise UserError(
                f"--rate: got {' '.join(map(str, self.rates))}, one rate twice: give each rate once"
            )
        if self.emulated and self.until_accuracy is not None:
            raise UserError(
                f"--compute {self.compute}: an emulated model learns nothing, so it reaches no "
                "accuracy. Leave out --until-accuracy, or --compute"
            )
        self._check_strategies()

    def _check_ranks(self) -> None:
        """Raise UserError if ranks share a node without a link, or outnumber the samples."""
        if self.ranks_per_node > 1 and None in self.rates:
            raise UserError(
                f"--ranks-per-node {self.ranks_per_node}: over loopback no node has a link that "
                "its ranks could share: add --rate, for example --rate 1gbit"
            )
        most_ranks = max(map(self.ranks_on, self.nodes))
        if self.scaling != "weak" and most_ranks > self.batch_size:
            got = str(max(self.nodes))
            if self.ranks_per_node > 1:
                got += f" with {self.ranks_per_node} ranks each"
            raise UserError(
                f"--nodes: got {got}, more than the {self.batch_size} samples of a "
                "global batch: give fewer ranks or a larger --batch-size"
            )

    def _check_counts(self) -> None:
        """Raise UserError unless all counts are from 1 to ``_MOST``."""
        counts = {
            "--nodes": self.nodes,
            "--steps": (self.steps,),
            "--warmup": (self.warmup,),
            "--repeats": (self.repeats,),
            "--ranks-per-node": (self.ranks_per_node,),
            "--batch-size": (self.batch_size,),
            "--epochs": (self.epochs,),
        }
        for name, values in counts.items():
            if not values or min(values) < 1 or max(values) > _MOST:
                found = " ".join(map(str, values)) or "nothing"
                raise UserError(f"{name}: got {found}, give whole numbers from 1 to {_MOST:,}")

    def _check_strategies(self) -> None:
        """Raise UserError for an unknown strategy, or a size of buckets for one without buckets."""
        from lab.predict.tables import message_plans  # slow, and --help imports this file

        for name, plan in message_plans(self.sync, groups=("all", "exact")).items():
            strategy, bucket_mb = split_variant(name)
            if bucket_mb is not None and not hasattr(plan, "bucket_mb"):
                raise UserError(
                    f"--sync: got {name}, but {strategy} has no buckets: give {strategy}"
                )

    def ranks_on(self, nodes: int) -> int:
        """Return the number of ranks on that many nodes; on a single one PartOne trains alone."""
        return nodes * self.ranks_per_node if nodes > 1 else 1

    @property
    def emulated(self) -> bool:
        """Whether layers sleep instead of computing."""
        return self.compute != "real"

    @property
    def seeds_to_run(self) -> tuple[int, ...]:
        """The seed of each repeat."""
        if self.until_accuracy is not None:
            return self.seeds
        return self.seeds[:1] * self.repeats

    @property
    def total_steps(self) -> int:
        """Steps of each run without ``until_accuracy``. The last ones record the timeline.

        All strategies run the same number, since the learning rate depends on it.
        """
        return self.warmup + self.steps + self._longest_period

    @property
    def _longest_period(self) -> int:
        """Steps after which the messages of every strategy repeat."""
        options = self.strategy_options
        periods = [
            build_message_plan_from(split_variant(name)[0], options).period for name in self.sync
        ]
        return max(periods, default=1)

    @property
    def strategy_options(self) -> dict[str, Any]:
        """The strategies' options among the flags, by the names of the strategies' arguments."""
        parsers = {flag(name): (name, parse) for name, parse in option_parsers().items()}
        options: dict[str, Any] = {"ranks_per_node": self.ranks_per_node}
        for given, value in pairwise(self.flags):
            if given in parsers:
                name, parse = parsers[given]
                try:
                    options[name] = parse(value)
                except ValueError:
                    return {}  # the part itself reports a wrong value
        return options

    @property
    def sync_batchnorm(self) -> bool:
        """Whether BatchNorm layers normalise over all ranks; the last of the flags counts."""
        given = [value for name, value in pairwise(self.flags) if name == "--sync-batchnorm"]
        return given[-1:] not in ([], ["off"])

    def as_json(self) -> dict[str, Any]:
        """Return the settings as plain values, as a JSON file gives them back."""
        from msgspec import json  # slow to import, and --help imports this file

        return json.decode(json.encode(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, name: str) -> "Settings":
        """Return the settings with these values of ``as_json``; ignore other keys.

        Raises UserError that begins with ``name`` if a value is none that a comparison can have.
        """
        from common.utils.typed_json import convert

        return convert(values, cls, name=name)
