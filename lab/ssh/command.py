"""The command of each host: the rank goes into a part's flags, torchrun's flags or placeholders.

``read_command`` adds what tells a host its place, as placeholders, and refuses what contradicts the
hosts; ``NodeCommand.fill`` returns the command of one host.
"""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from common.errors import UserError
from common.utils.environment import DEFAULT_MASTER_PORT
from lab.cluster.program import check_placeholders, fill_in

_PART = re.compile(r"(^|/)Part(One|Two|Three)/main\.py$")
_TORCHRUN = re.compile(r"(torchrun|python\S* -m torch\.distributed\.run)(?= |$)")
# A placeholder of a command that says itself where its ranks are.
_PLACE = re.compile(r"\{(master|nodes?|rank|local_rank|port)\}")
_BEFORE = "give --master-ip and --master-port to lab launch, before --"
# Flags that lab launch sets itself, and what to do instead, or why.
_OF_PARTS = {
    "-M": _BEFORE,
    "--master-ip": _BEFORE,
    "--master-port": _BEFORE,
    "--dist-url": _BEFORE,
    "--run-token": "lab launch makes one, or passes on LAB_RUN_TOKEN from its own environment",
    "--distributed": "for several ranks on each host: "
    "-- torchrun --nproc-per-node 2 PartThree/main.py",
    **dict.fromkeys(
        ("-N", "--num-nodes", "--world-size", "-R", "--rank", "--local-rank"),
        "--hosts says which and how many there are",
    ),
}
# Likewise those of torchrun.
_OF_TORCHRUN = {
    "--standalone": "it is for one machine",
    "--node-rank": "--hosts says which there are",
}

_EXAMPLE = "lab launch --hosts node0,node1 -- python PartTwo/main.py --sync all_reduce"


@dataclass(frozen=True)
class NodeCommand:
    """One command for all hosts.

    words : with placeholders for what differs from host to host. script : the file of the part that
    it runs, as given, if it runs one. flags : their values. ranks_per_node : that each host runs.
    """

    words: Sequence[str]
    script: str | None
    port: int
    flags: Mapping[str, str | None]
    ranks_per_node: int = 1

    def fill(self, *, master: str, nodes: int, rank: int, python: str) -> list[str]:
        """Return the command of one rank. nodes : the number of ranks.

        python : the host's interpreter, which replaces the word python.
        """
        words = fill_in(
            self.words,
            master=master,
            nodes=nodes,
            rank=rank,
            port=self.port,
            ranks_per_node=self.ranks_per_node,
        )
        if words[0] in ("python", "python3"):
            words[0] = python
        return words


def read_command(
    typed: Sequence[str], *, nodes: int, port: int | None, ranks_per_node: int = 1
) -> NodeCommand:
    """Read a command for ``nodes`` ranks; port : at which rank 0 waits, if the user has given one.

    UserError if it sets a rank itself, or cannot run on that number of hosts.
    """
    if not typed:
        raise UserError(f"no command: add it after --, for example {_EXAMPLE}")
    check_placeholders(typed)
    flags = _flags(typed)
    script = next(filter(_PART.search, typed), None)
    trains_alone = script is not None and "PartOne" in script
    if trains_alone and nodes > 1:
        raise _too_many_for_one(nodes, ranks_per_node)
    words = list(typed)
    program = PurePosixPath(typed[0]).name  # its folder may have a blank
    torchrun = _TORCHRUN.match(" ".join([program, *typed[1:]]))
    says_its_place = _PLACE.search(" ".join(typed)) is not None
    if torchrun and not says_its_place:
        words = _with_torchrun_flags(typed, len(torchrun[0].split()), nodes, ranks_per_node)
    elif script is not None and not trains_alone and not says_its_place:
        _refuse(flags, _OF_PARTS)
        words += ["--master-ip", "{master}", "--num-nodes", "{nodes}", "--rank", "{rank}"]
        if port is not None:
            words += ["--master-port", "{port}"]
    return NodeCommand(words, script, port or _own_port(flags), flags, ranks_per_node)


def _own_port(flags: Mapping[str, str | None]) -> int:
    """Return the port that the command itself gives, else the default."""
    given = flags.get("--master-port") or ""
    return int(given) if given.isdecimal() else DEFAULT_MASTER_PORT


def _too_many_for_one(nodes: int, ranks_per_node: int) -> UserError:
    given = f"--hosts names {nodes} hosts"
    if ranks_per_node > 1:
        given = f"--ranks-per-node is {ranks_per_node}"
    return UserError(
        f"PartOne trains in one process, but {given}: give one host and one rank, "
        "or use PartTwo or PartThree"
    )


def _flags(words: Sequence[str]) -> dict[str, str | None]:
    """Return the value of each flag, by its name with dashes; of repeated flags the last counts.

    A flag that takes no value gets the word after it, or None at the end.
    """
    flags: dict[str, str | None] = {}
    value: str | None
    for word, following in itertools.zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            if not equals:
                value = following
            flags[name.replace("_", "-")] = value
    return flags


def _with_torchrun_flags(
    typed: Sequence[str], start: int, nodes: int, ranks_per_node: int
) -> list[str]:
    """Return a command of torchrun with the flags that place a host, from word ``start`` on."""
    if ranks_per_node > 1:
        raise UserError(
            f"--ranks-per-node {ranks_per_node}: torchrun starts the ranks of a host "
            f"itself: give it --nproc-per-node {ranks_per_node}, after --"
        )
    program = list(typed[:start])
    if typed[0] == "torchrun":  # as a module: no program torchrun need be in PATH
        program = ["python", "-P", "-m", "torch.distributed.run"]
    return [*program, *_torchrun_flags(typed, nodes), *typed[start:]]


def _torchrun_flags(words: Sequence[str], nodes: int) -> list[str]:
    """Return the flags of torchrun to add. UserError on a contradiction."""
    given = _flags(list(itertools.takewhile(lambda word: not word.endswith(".py"), words)))
    _refuse(given, _OF_TORCHRUN)
    # N, or MIN:MAX for an elastic run.
    numbers = re.fullmatch(r"(\d+)(?::(\d+))?", given.get("--nnodes", str(nodes)) or "")
    if numbers is None or not int(numbers[1]) <= nodes <= int(numbers[2] or numbers[1]):
        raise UserError(
            f"--nnodes {given['--nnodes']} in the command, but --hosts names {nodes}: remove "
            "it, or make the two agree"
        )
    wanted = {"--nnodes": "{nodes}", "--node-rank": "{rank}"}
    if not {"--rdzv-endpoint", "--rdzv-backend"} & given.keys():
        wanted |= {"--master-addr": "{master}", "--master-port": "{port}"}
    return [f"{name}={value}" for name, value in wanted.items() if name not in given]


def _refuse(flags: Collection[str], why: Mapping[str, str]) -> None:
    """Raise UserError for a flag that ``why`` has, with what it says."""
    for name in flags:
        if name in why:
            raise UserError(
                f"{name} in the command: lab launch gives each host its own place: remove it; "
                f"{why[name]}"
            )
