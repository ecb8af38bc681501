"""Each host's place in the command: the flags of the parts, those of torchrun, or placeholders, whichever it takes.

``NodeCommands.of`` reads the command and refuses what contradicts the hosts; ``NodeCommands.fill`` gives one host's.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.errors import UserError
from common.utils.environment import DEFAULT_MASTER_PORT
from lab.cluster.program import check_placeholders, fill_in

_PART = re.compile(r"(?:^|/)(Part(?:One|Two|Three))/main\.py$")
_PYTHON = ("python", "python3")
_BEFORE = "give --master-ip and --master-port to lab launch, before --"
_PLACES = {
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
    "--distributed": "for several ranks on each host: -- torchrun --nproc-per-node 2 PartThree/main.py",
}
"""Flags of the parts that say what lab launch says, and what to do instead."""

_EXAMPLE = "lab launch --hosts node0,node1 -- python PartTwo/main.py --sync all_reduce"


@dataclass(frozen=True)
class NodeCommands:
    """A command with how it learns its place.

    way : "part" (its flags are appended), "torchrun" (those of it that are absent), "filled" (placeholders), "plain" (not at
    all). part : name of the part that it runs; script : its file, as given.
    """

    words: tuple[str, ...]
    nodes: int
    way: str
    part: str | None = None
    script: str | None = None
    port: int | None = None
    _added: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, words: Sequence[str], *, nodes: int, port: int | None) -> "NodeCommands":
        """Read a command for ``nodes`` hosts. UserError where it names a place itself, or cannot run on so many."""
        if not words:
            raise UserError(f"no command: give it behind --, for example {_EXAMPLE}")
        check_placeholders(words)
        script = next((word for word in words if _PART.search(word)), None)
        part = _PART.search(script)[1] if script is not None else None
        if part == "PartOne" and nodes > 1:
            raise UserError(
                f"PartOne trains on one process, and --hosts names {nodes}: give one host, or PartTwo or PartThree"
            )
        if any(re.search(r"\{(master|nodes|rank|port)\}", word) for word in words):
            return cls(tuple(words), nodes, "filled", part, script, port)
        if _launcher_words(words):
            return cls(
                tuple(words), nodes, "torchrun", part, script, port, _check_torchrun(words, nodes)
            )
        if part is None or part == "PartOne":
            return cls(tuple(words), nodes, "plain", part, script, port)
        _refuse_places(words)
        return cls(tuple(words), nodes, "part", part, script, port)

    @property
    def meets(self) -> bool:
        """Whether the hosts' processes meet at a master."""
        return self.way != "plain"

    @property
    def meeting_port(self) -> int:
        """Where they meet there."""
        own = self.value("--master-port") or ""
        return self.port or (int(own) if own.isdecimal() else DEFAULT_MASTER_PORT)

    def fill(self, *, master: str, rank: int, python: str) -> list[str]:
        """Return the command of one host. ``python`` : its interpreter, which stands for the word python."""
        words = [python, *self.words[1:]] if self.words[0] in _PYTHON else list(self.words)
        if self.way == "part":
            place = ["--master-ip", master, "--num-nodes", str(self.nodes), "--rank", str(rank)]
            return [
                *words,
                *place,
                *(["--master-port", str(self.port)] if self.port is not None else []),
            ]
        if self.way == "torchrun":
            start = _launcher_words(self.words)
            given = {
                "--nnodes": self.nodes,
                "--node-rank": rank,
                "--master-addr": master,
                "--master-port": self.meeting_port,
            }
            # As a module, so that no program torchrun need be in PATH.
            first = (
                [python, "-m", "torch.distributed.run"]
                if self.words[0] == "torchrun"
                else words[:start]
            )
            return [*first, *(f"{name}={given[name]}" for name in self._added), *words[start:]]
        return fill_in(words, master=master, nodes=self.nodes, rank=rank, port=self.meeting_port)

    def value(self, flag: str) -> str | None:
        """Return what the command gives for a flag of the parts, the last one counts; None where it does not."""
        found, words = None, list(self.words)
        for index, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name.replace("_", "-") == flag:
                found = value if equals else (words[index + 1] if index + 1 < len(words) else None)
        return found


def _launcher_words(words: Sequence[str]) -> int:
    """How many words at the beginning start torchrun; 0 where they start something else."""
    program = words[0].rpartition("/")[2]
    if program == "torchrun":
        return 1
    return (
        3
        if program.startswith("python") and tuple(words[1:3]) == ("-m", "torch.distributed.run")
        else 0
    )


def _own_flags(words: Sequence[str]) -> dict[str, str | None]:
    """The flags of torchrun itself, which stand before the file that it runs, dashes as it takes them."""
    flags: dict[str, str | None] = {}
    rest = list(words[_launcher_words(words) :])
    for index, word in enumerate(rest):
        if word.endswith(".py"):
            break
        if word.startswith("--"):
            name, equals, value = word.replace(
                "_", "-", word.partition("=")[0].count("_")
            ).partition("=")
            flags[name] = value if equals else (rest[index + 1] if index + 1 < len(rest) else None)
    return flags


def _check_torchrun(words: Sequence[str], nodes: int) -> tuple[str, ...]:
    """Return the names of torchrun's flags that are to be added. UserError on a contradiction."""
    given = _own_flags(words)
    if "--standalone" in given:
        raise UserError(
            "--standalone is for one machine: leave it out, and lab launch gives torchrun the master's address"
        )
    if "--node-rank" in given:
        raise UserError(f"--node-rank {given['--node-rank']}: each host gets its own; leave it out")
    if "--nnodes" in given:
        least, _, most = (given["--nnodes"] or "").partition(":")
        if (
            not least.isdecimal()
            or not (most or least).isdecimal()
            or not int(least) <= nodes <= int(most or least)
        ):
            raise UserError(
                f"--nnodes {given['--nnodes']} in the command, but --hosts names {nodes}: leave it out, or make them "
                "agree"
            )
    meeting = (
        ("--master-addr", "--master-port")
        if not {"--rdzv-endpoint", "--rdzv-backend"} & given.keys()
        else ()
    )
    return tuple(name for name in ("--nnodes", "--node-rank", *meeting) if name not in given)


def _refuse_places(words: Sequence[str]) -> None:
    for word in words:
        name = word.partition("=")[0]
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in _PLACES:
            instead = f"; {_PLACES[name]}" if _PLACES[name] else ""
            raise UserError(
                f"{word.partition('=')[0]} in the command: lab launch gives each host its --master-ip, --num-nodes "
                f"and --rank; leave it out{instead}"
            )
