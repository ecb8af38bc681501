"""The command of each node: the rank goes into a part's flags, torchrun's flags or placeholders.

``NodeCommands.of`` reads the command and refuses what contradicts the hosts;
``NodeCommands.fill`` returns the command of one node.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import UserError
from common.utils.environment import DEFAULT_MASTER_PORT
from lab.cluster.program import check_placeholders, fill_in

_PART = re.compile(r"(?:^|/)(Part(?:One|Two|Three))/main\.py$")
_PYTHON = ("python", "python3")
_BEFORE = "give --master-ip and --master-port to lab launch, before --"
_RANK_FLAGS = {
    "-M": _BEFORE,
    "--master-ip": _BEFORE,
    "--master-port": _BEFORE,
    "--dist-url": _BEFORE,
    "-N": "",
    "--num-nodes": "",
    "--world-size": "",
    "-R": "",
    "--rank": "",
    "--local-rank": "",
    "--run-token": "lab launch makes one, or passes on LAB_RUN_TOKEN from its own environment",
    "--distributed": "for several ranks on each host: "
    "-- torchrun --nproc-per-node 2 PartThree/main.py",
}
"""The parts' flags that lab launch sets itself, and what to do instead."""

_EXAMPLE = "lab launch --hosts node0,node1 -- python PartTwo/main.py --sync all_reduce"


@dataclass(frozen=True)
class NodeCommands:
    """One command, and how each node learns its rank from it.

    kind : "part" appends the part's flags, "torchrun" inserts the flags of torchrun that are
    absent, "filled" replaces placeholders, "plain" tells the node nothing.
    part : name of the part that it runs. script : the part's file, as given.
    """

    words: tuple[str, ...]
    nodes: int
    kind: str
    part: str | None = None
    script: str | None = None
    port: int | None = None

    @classmethod
    def of(cls, words: Sequence[str], *, nodes: int, port: int | None) -> "NodeCommands":
        """Read a command for ``nodes`` hosts.

        UserError if it sets a rank itself, or cannot run on that number of hosts.
        """
        if not words:
            raise UserError(f"no command: add it after --, for example {_EXAMPLE}")
        check_placeholders(words)
        main = next(filter(None, map(_PART.search, words)), None)
        part, script = (main[1], main.string) if main is not None else (None, None)
        if part == "PartOne" and nodes > 1:
            raise UserError(
                f"PartOne trains in one process, but --hosts names {nodes} hosts: give one host, "
                "or use PartTwo or PartThree"
            )
        kind = "plain"
        if any(re.search(r"\{(master|nodes|rank|port)\}", word) for word in words):
            kind = "filled"
        elif _launcher_words(words):
            kind = "torchrun"
            _torchrun_flags_to_add(words, nodes)  # refuses what contradicts the hosts
        elif part in ("PartTwo", "PartThree"):
            kind = "part"
            _refuse_rank_flags(words)
        return cls(tuple(words), nodes, kind, part, script, port)

    @property
    def master_port(self) -> int:
        """The port at which rank 0 waits."""
        own = self.value("--master-port") or ""
        return self.port or (int(own) if own.isdecimal() else DEFAULT_MASTER_PORT)

    def fill(self, *, master: str, rank: int, python: str) -> list[str]:
        """Return the command of one host.

        python : the host's interpreter, which replaces the word python.
        """
        words = [python, *self.words[1:]] if self.words[0] in _PYTHON else list(self.words)
        if self.kind == "part":
            flags = ["--master-ip", master, "--num-nodes", str(self.nodes), "--rank", str(rank)]
            port_flag = ["--master-port", str(self.port)] if self.port is not None else []
            return [*words, *flags, *port_flag]
        if self.kind == "torchrun":
            given = {
                "--nnodes": self.nodes,
                "--node-rank": rank,
                "--master-addr": master,
                "--master-port": self.master_port,
            }
            start = _launcher_words(self.words)
            launcher = words[:start]
            if self.words[0] == "torchrun":  # as a module: no program torchrun need be in PATH
                launcher = [python, "-m", "torch.distributed.run"]
            added = _torchrun_flags_to_add(self.words, self.nodes)
            return [*launcher, *(f"{name}={given[name]}" for name in added), *words[start:]]
        return fill_in(words, master=master, nodes=self.nodes, rank=rank, port=self.master_port)

    def value(self, flag: str) -> str | None:
        """Return the command's value of a flag of the parts; None if it gives none."""
        return _flags(self.words).get(flag)


def _launcher_words(words: Sequence[str]) -> int:
    """Return how many words at the beginning start torchrun; 0 if they start something else."""
    program = words[0].rpartition("/")[2]
    if program == "torchrun":
        return 1
    as_module = tuple(words[1:3]) == ("-m", "torch.distributed.run")
    return 3 if program.startswith("python") and as_module else 0


def _flags(words: Sequence[str]) -> dict[str, str | None]:
    """Return the value of each flag, by its name with dashes; of repeated flags the last counts.

    A flag that takes no value gets the word after it, or None at the end.
    """
    flags = {}
    for word, following in itertools.zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            flags[name.replace("_", "-")] = value if equals else following
    return flags


def _torchrun_flags_to_add(words: Sequence[str], nodes: int) -> list[str]:
    """Return the names of torchrun's flags to add. UserError on a contradiction."""
    own = itertools.takewhile(lambda word: not word.endswith(".py"), words)
    given = _flags(list(own))
    if "--standalone" in given:
        raise UserError(
            "--standalone is for one machine: remove it; lab launch gives torchrun the master's "
            "address"
        )
    if "--node-rank" in given:
        raise UserError(
            f"--node-rank {given['--node-rank']} in the command: remove it; lab launch gives each "
            "host its own"
        )
    if "--nnodes" in given:
        least, _, most = (given["--nnodes"] or "").partition(":")
        numbers = least.isdecimal() and (most or least).isdecimal()
        if not numbers or not int(least) <= nodes <= int(most or least):
            raise UserError(
                f"--nnodes {given['--nnodes']} in the command, but --hosts names {nodes}: remove "
                "it, or make the two agree"
            )
    wanted = ["--nnodes", "--node-rank"]
    if not {"--rdzv-endpoint", "--rdzv-backend"} & given.keys():
        wanted += ["--master-addr", "--master-port"]
    return [name for name in wanted if name not in given]


def _refuse_rank_flags(words: Sequence[str]) -> None:
    for name in (word.partition("=")[0] for word in words):
        instead = _RANK_FLAGS.get(name.replace("_", "-"))
        if instead is not None:
            raise UserError(
                f"{name} in the command: lab launch gives each host its --master-ip, --num-nodes "
                f"and --rank itself; remove it{f'; {instead}' if instead else ''}"
            )
