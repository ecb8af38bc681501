"""What the user typed after ``--``: how it starts its ranks, and with which words.

``parse_command`` looks at it once; ``AuditCommand.processes`` gives the commands to start.
"""

import os
import re
import shlex
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import UserError
from lab.cluster.program import check_placeholders, fill_in

# The end of the words that start a launcher.
_LAUNCHER = re.compile(
    r"(?:^|[/ ])(torchrun|-m torch\.distributed\.(?:run|launch)|accelerate launch)$"
)
# By launcher, its flags for the number of ranks and the port; others have those of torchrun.
_FLAGS = {"accelerate launch": ("--num_processes", "--main_process_port")}


@dataclass(frozen=True)
class AuditCommand:
    """A command with its placeholders.

    words : as typed.
    rank0 : the command of rank 0, where it has a script of its own.
    """

    words: tuple[str, ...]
    rank0: tuple[str, ...] | None = None

    @property
    def text(self) -> str:
        """The command as a shell needs it; a word that is a placeholder stays without quotes."""
        return re.sub(r"'(\{\w+\})'", r"\1", shlex.join(self.words))

    @property
    def one_process_a_rank(self) -> bool:
        """Whether each rank is started by itself; otherwise the command starts its ranks."""
        return self.rank0 is not None or "{rank}" in self.text

    @property
    def tells_rank(self) -> bool:
        """Whether the ranks are told their numbers, by a placeholder or a launcher."""
        return self.one_process_a_rank or self.started != self.words

    @property
    def started(self) -> tuple[str, ...]:
        """The words that start a rank, or the launcher of all, which is told their number."""
        return self.words if self.one_process_a_rank else _with_flags(self.words)

    @property
    def takes_size(self) -> bool:
        """Whether the number of ranks can be chosen."""
        return self.one_process_a_rank or "{nodes}" in " ".join(self.started)

    def processes(self, size: int | None, *, master: str, port: int) -> list[list[str]]:
        """Return the command of each process to start, by rank if there is one a rank.

        size : the number of ranks; None only if the command does not take it.
        """
        nodes = size or 1
        commands = [self.rank0 or self.started]
        if self.one_process_a_rank:
            commands += [self.words] * (nodes - 1)
        return [
            fill_in(words, master=master, nodes=nodes, rank=rank, port=port)
            for rank, words in enumerate(commands)
        ]

    def user_folder(self, cwd: Path) -> Path:
        """Return the folder of the user's code: the script's, or ``cwd`` if that is above it.

        A relative path comes before an absolute one: what starts the script, as a course's driver.
        """
        words = [word for word in self.words if word.endswith(".py")]
        words.sort(key=os.path.isabs)
        script = next(filter(Path.is_file, map(cwd.joinpath, words)), None)
        folder = cwd if script is None else script.resolve().parent
        # then Python's own modules would count as the user's
        holds_python = Path(sysconfig.get_path("stdlib")).is_relative_to(cwd)
        if folder.is_relative_to(cwd) and not holds_python:
            return cwd
        return folder


def parse_command(words: Sequence[str], rank0: str | None) -> AuditCommand:
    """Return what follows ``--``. Raises UserError if there is nothing, or a wrong placeholder."""
    if not words:
        raise UserError(
            "no command: add it after --, for example lab audit -- python main.py --master-ip "
            "{master} --num-nodes {nodes} --rank {rank}"
        )
    command = AuditCommand(tuple(words))
    if rank0 is not None:
        of_rank0 = _quoted_words(rank0, "--rank0", "give rank 0's whole command in quotes")
        command = replace(command, rank0=of_rank0)
    starts_all = "{rank}" not in command.text and _with_flags(command.words) != command.words
    if command.rank0 is not None and starts_all:
        raise UserError(
            "--rank0: the command after -- starts all ranks itself: give the one that starts a "
            "single rank, or leave --rank0 out"
        )
    check_placeholders([*command.words, *(command.rank0 or ())])
    return command


def right_command(text: str, command: AuditCommand) -> AuditCommand:
    """Return the command that ``--like`` gives: often a script alone, in place of the audited one.

    Raises UserError for what is no command, or a script that has no place in the audited command.
    """
    words = _quoted_words(text, "--like", "give a script, a command in quotes or a folder")
    if not words[0].endswith(".py"):
        return parse_command(words, None)
    if not Path(words[0]).is_file():
        raise UserError(f"--like: there is no file {words[0]}")
    scripts = [word for word in command.words if word.endswith(".py")]
    if not scripts or command.rank0 is not None:
        raise UserError(
            "--like: the audited command does not run one .py file alone: give the right one's "
            "whole command in quotes, or the folder in which lab audit --keep left its records"
        )
    place = command.words.index(scripts[0])
    arguments = words[1:] or command.words[place + 1 :]
    return AuditCommand((*command.words[:place], words[0], *arguments))


def with_python(words: Sequence[str]) -> list[str]:
    """Return a command's words, with ``python`` before a script that stands alone."""
    return ["python", *words] if words[0].endswith(".py") else list(words)


def _quoted_words(text: str, flag: str, cure: str) -> tuple[str, ...]:
    """Return the words of a flag's command. Raises UserError if there are none."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"{flag}: {error} in {text!r}: give the command in quotes") from error
    if not words:
        raise UserError(f"{flag}: got an empty command; {cure}")
    return words


def _with_flags(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return a launcher's words with flags for the number of ranks and the port; others unchanged.

    The flags come right before the script, so they overrule the same flags before it.
    """
    # the fewest first words that end in a launcher
    for end in range(1, len(words) + 1):
        launcher = _LAUNCHER.search(" ".join(words[:end]))
        if launcher is None:
            continue
        ranks, port = _FLAGS.get(launcher[1], ("--nproc_per_node", "--master_port"))
        script = end
        for place in range(end, len(words)):
            if words[place].endswith(".py") or words[place] in ("-m", "--module"):
                script = place
                break
        return *words[:script], ranks, "{nodes}", port, "{port}", *words[script:]
    return words
