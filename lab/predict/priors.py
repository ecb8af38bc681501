"""What other people's clusters cost: priors with ranges, and draws from them. Imports no torch.

priors.toml holds the numbers beside their sources. A prior is a value that differs between
clusters: z = 0 is the typical one, and z is normally distributed with a standard deviation of 1, so
that 80 % of clusters lie between low and high. ``Beliefs`` has the z of all priors.
"""

import math
import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAWS = 256
_SHARES = ("_share", ".overlap_cost")  # how the names of shares end
HIGH_Z = NormalDist().inv_cdf(0.9)  # z of a prior's high value


@dataclass(frozen=True)
class Prior:
    """A positive value that differs between clusters: 80 % of them lie between low and high.

    name : section and name in priors.toml, "nccl-tcp.most_gbit". meaning, source : for a reader.
    """

    name: str
    low: float
    typical: float
    high: float
    meaning: str
    source: str

    def at(self, z: Any) -> Any:
        """Return the value at ``z``, a number or an array of draws. Between neighbours the
        logarithm of the value grows evenly; below the typical value at another rate than above.
        """
        upward = (self.high / self.typical) ** (np.maximum(z, 0.0) / HIGH_Z)
        downward = (self.low / self.typical) ** (np.maximum(np.negative(z), 0.0) / HIGH_Z)
        return self.typical * upward * downward

    @property
    def short_name(self) -> str:
        """The name without its section: "most_gbit"."""
        return self.name.partition(".")[2]

    def holds(self, backend: str, transport: str) -> bool:
        """Whether the section is of such clusters; transport with its generation."""
        section = self.name.partition(".")[0]
        return section == "any" or f"{backend}-{transport}-".startswith(f"{section}-")

    @property
    def most(self) -> float:
        """The largest value that makes sense: 1 of a share."""
        return 1.0 if self.name.endswith(_SHARES) else math.inf


@dataclass(frozen=True)
class ClusterValues:
    """What one cluster costs, or one in each of ``DRAWS`` draws: the fields hold floats or arrays.

    The names are those of priors.toml, in seconds and bits a second; ``sum_seconds``,
    ``update_seconds`` and ``compress_seconds``, by compressor, are of a byte. ``most_bits`` is
    infinite, and ``tree_share`` 0, where no such limit and no tree is known.
    """

    fixed_share: Any
    node_loss: Any
    unexplained: Any
    overlap_cost: Any
    straggler: Any
    inside_bits: Any
    inside_seconds: Any
    update_seconds: Any
    sum_seconds: Any
    line_share: Any
    most_bits: Any
    message_seconds: Any
    call_seconds: Any
    root_call_seconds: Any
    tree_share: Any
    compress_seconds: Mapping[str, Any]

    def batch_share(self, samples: float) -> Any:
        """Return a rank's step with ``samples`` times its samples, as a share of its step now."""
        return self.fixed_share + (1 - self.fixed_share) * samples

    def straggling(self, nodes: int) -> Any:
        """Return how many times longer than the mean node the slowest of ``nodes`` takes.

        The expected largest of N normal values is at most sqrt(2 ln N) standard deviations above
        the mean, and comes close to it.
        """
        return 1.0 + self.straggler * (2 * np.log(nodes)) ** 0.5


@cache
def normal_draws(count: int) -> NDArray[np.float64]:
    """Return ``count`` rows of ``DRAWS`` normal values: each row the same values in another order.

    A Latin hypercube. Python's own generator is the same on every machine and in every version.
    """
    shuffled = random.Random(45)
    normal = NormalDist()
    rows = []
    for _ in range(count):
        shares = [(draw + 0.5) / DRAWS for draw in range(DRAWS)]
        shuffled.shuffle(shares)
        rows.append([normal.inv_cdf(share) for share in shares])
    return np.array(rows)


@dataclass(frozen=True)
class Beliefs:
    """Priors, and what is known of their z: mean, and a square root of its covariance.

    mean, root : of shape (priors,) and (priors, priors). Before a fit they are 0 and the identity.
    """

    priors: tuple[Prior, ...]
    mean: NDArray[np.float64]
    root: NDArray[np.float64]

    @classmethod
    def of(cls, priors: tuple[Prior, ...]) -> "Beliefs":
        """Return what is known of these priors before a fit."""
        return cls(priors, np.zeros(len(priors)), np.eye(len(priors)))

    def typical(self, backend: str, transport: str) -> ClusterValues:
        """Return the values at the mean."""
        return self.at(self.mean, backend, transport)

    def drawn(self, backend: str, transport: str) -> ClusterValues:
        """Return the values of ``DRAWS`` draws."""
        z = self.mean[:, None] + self.root @ normal_draws(len(self.priors))
        return self.at(z, backend, transport)

    def at(self, z: NDArray[np.float64], backend: str, transport: str) -> ClusterValues:
        """Return the values at ``z``, of shape (priors,) or (priors, any number).

        transport : with its generation, e.g. "tcp-vm"; see ``lab.predict.cluster.GENERATIONS``.
        """
        found: dict[str, Any] = {}
        for prior, own_z in zip(self.priors, z, strict=True):
            # A more special section stands below the others, and its values replace theirs.
            if prior.holds(backend, transport):
                value = prior.at(own_z)
                found[prior.short_name] = float(value) if z.ndim == 1 else value
        found.setdefault("root_call_us", found.get("call_us"))
        found.setdefault("inside_us", found["message_us"])
        return ClusterValues(
            fixed_share=np.minimum(found["fixed_share"], 1.0),
            node_loss=found["node_loss"],
            unexplained=found["unexplained"],
            overlap_cost=_at_most_one(found["overlap_cost"]),
            straggler=found["straggler"],
            inside_bits=1e9 * found["inside_gbit"],
            inside_seconds=1e-6 * found["inside_us"],
            update_seconds=1e-9 / found["update_gbytes"],
            sum_seconds=1e-9 / found["sum_gbytes"] if "sum_gbytes" in found else 0.0,
            line_share=_at_most_one(found["line_share"]),
            most_bits=1e9 * found.get("most_gbit", math.inf),
            message_seconds=1e-6 * found["message_us"],
            call_seconds=1e-6 * found.get("call_us", 0.0),
            root_call_seconds=1e-6 * found["root_call_us"],
            tree_share=_at_most_one(found.get("tree_share", 0.0)),
            compress_seconds={
                "search": 1e-9 / found["search_gbytes"],
                "project": 1e-9 / found["project_gbytes"],
                "cast": 1e-9 / found["cast_gbytes"],
            },
        )


def _at_most_one(value: Any) -> Any:
    if isinstance(value, float):
        return min(1.0, value)
    return np.minimum(value, 1.0)


def priors_path() -> Path:
    """Return the file of the priors that comes with the project."""
    return Path(__file__).with_name("priors.toml")


@cache
def load_priors() -> tuple[Prior, ...]:
    """Return the priors in the file's order."""
    tables: Mapping[str, Mapping[str, Any]] = tomllib.loads(
        priors_path().read_text(encoding="utf-8")
    )
    priors = []
    for section, entries in tables.items():
        for name, entry in entries.items():
            low, typical, high = entry["prior"]
            prior = Prior(
                f"{section}.{name}", low, typical, high, entry["meaning"], entry["source"]
            )
            priors.append(prior)
    return tuple(priors)
