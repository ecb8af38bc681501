"""Turn a command line, and the recipe that it names, into a ``Config``.

``FlagParser`` is also the parser of the ``lab`` commands.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from common.config.recipes import find_recipe, read_recipe
from common.config.schema import (
    CLUSTER,
    DATA,
    EITHER_OR,
    OPTIMIZER,
    RECIPE,
    RUN,
    TRAINING,
    Config,
    Setting,
    flag,
    settings,
)
from common.errors import UserError
from common.sync import STRATEGIES
from common.utils.registry import choices_text, closest

_IN_PLACE_OF = dict(EITHER_OR) | {other: name for name, other in EITHER_OR}
_IN_PLACE_OF["epochs"] = "max_steps"
"""A flag replaces the recipe's setting of the other name."""

_BASIC = (
    *("recipe", "sync", "master_ip", "world_size", "rank", "distributed", "meeting_timeout"),
    *("dataset", "data_dir", "model", "epochs", "max_steps", "batch_size", "local_batch_size"),
    *("accumulation_steps", "learning_rate", "opt", "momentum", "weight_decay", "seed", "amp"),
    *("target_accuracy", "patience", "gpu_ids", "experiment", "resume", "log_wandb"),
)
"""The settings that --help shows; --help-all shows every one."""

_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", str: "TEXT"} | {
    "master_ip": "ADDRESS",
    "dist_url": "URL",
    "mirror": "URL",
    "resume": "PATH",
    "recipe": "NAME",
    "run_name": "NAME",
    "gpu_ids": "IDS",
}
_NO_WORKERS = (
    "there is no flag --num-workers, as no worker loads images: all are in memory as bytes, and "
    "each batch is augmented as one tensor. Leave it out"
)
# Flags of other training scripts, and what stands for them here.
_ELSEWHERE = {
    "-a": "--model, or a recipe",
    "--arch": "--model, or a recipe",
    "--wd": "--weight-decay",
    "--fp16": "--amp --amp-dtype fp16",
    "--gpu": "--gpu-ids",
    "--gpus": "--distributed --world-size N, and --gpu-ids to choose them",
    "--nproc": "--distributed --world-size N",
    "--multiprocessing-distributed": "--distributed --world-size N",
    "--nodes": "--num-nodes",
    "--dist-backend": "--backend",
    "--batch-size-per-gpu": "-b",
    "--data": "--data-dir",
    "--optimizer": "--opt",
    "--scheduler": "--schedule",
    "--clip-grad-norm": "--clip-norm",
    "--sync-bn": "--sync-batchnorm on",
    "--print-freq": "--log-every",
    "--start-epoch": "--resume, which continues where the checkpoint ends",
    "--evaluate": "nothing: every run ends with an evaluation; --resume loads a checkpoint",
    "--pin-memory": "nothing: all images are in memory",
    "--project": "--experiment, or WANDB_PROJECT",
    "--entity": "WANDB_ENTITY",
}
_ONE_PROCESS = (
    "{part} has no {flag}: it trains on one process. PartTwo and PartThree train on several"
)

# argparse's messages, and ours
_REWORDED = {
    "^argument ": "",
    "expected (one|at least one) argument": "give a value",
    "ignored explicit argument (.*)": r"got \1, but it takes no value",
    "the following arguments are required:": "missing:",
    "invalid int value: (.*)": r"got \1, give a whole number",
    "invalid float value: (.*)": r"got \1, give a number",
}


class FlagFormatter(argparse.HelpFormatter):
    """Show the value of a flag with several names once: ``-N, --num-nodes N``."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        metavar = self._get_default_metavar_for_optional(action)
        value = "" if action.nargs == 0 else f" {self._format_args(action, metavar)}"
        return ", ".join(action.option_strings) + value


class _PartFormatter(FlagFormatter, argparse.RawDescriptionHelpFormatter):
    pass


class FlagParser(argparse.ArgumentParser):
    """Raises an error as a UserError of one line, and names the flag or command probably meant.

    A command that needs a subcommand and gets no argument at all prints its help; status 2.
    """

    notes: Mapping[str, str] = {}
    """What to say about a flag, or about a flag and its value, that other programs have."""

    def error(self, message: str) -> NoReturn:
        """Raise the message as a UserError."""
        listing = "--help-all" if "--help-all" in self._option_string_actions else "--help"
        for argparses, ours in _REWORDED.items():
            message = re.sub(argparses, ours, message)
        raise UserError(f"{message} ({self.prog} {listing} lists the flags)")

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads for the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse the arguments; an unknown one is an error, here and in subcommands."""
        if not args and self._subparsers is not None:
            self.print_help(sys.stderr)
            self.exit(2)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            wrong_flags = [word for word in unknown if word.startswith("-")]
            self._refuse(wrong_flags[0] if wrong_flags else unknown[0])
        return namespace, unknown

    def _refuse(self, unknown: str) -> NoReturn:
        name = unknown.partition("=")[0]
        if name in self.notes:
            raise UserError(self.notes[name])
        if not name.startswith("-"):
            self.error(f"unexpected argument {unknown!r}")
        known = [word for word in self._option_string_actions if re.match("--(?!no-)", word)]
        close = closest(name, [*known, *self.notes])
        if close is None:
            self.error(f"there is no flag {name}")
        hint = f"did you mean {close}? {self.notes.get(close, '')}".rstrip()
        self.error(f"there is no flag {name}: {hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            raise UserError(
                f"{self.prog}: there is no command {value!r}: {choices_text(value, action.choices)}"
            )
        long_names = [word for word in action.option_strings if word.startswith("--")]
        name = long_names[0] if long_names else action.metavar
        if note := self.notes.get(f"{name} {value}"):
            raise UserError(note)
        raise UserError(
            f"{name}: got {value!r}, {choices_text(str(value), map(str, action.choices))}"
        )


def _path(text: str) -> Path:
    if not text:  # Path("") would be the current folder
        raise argparse.ArgumentTypeError("got '', give a path or leave the flag out")
    return Path(text)


def _foreign_flags(part: str, sync_choices: Sequence[str]) -> dict[str, str]:
    """Return what to say about flags of other programs, and strategies of other parts."""
    notes = dict.fromkeys(("--num-workers", "--workers", "-j"), _NO_WORKERS)
    for name, ours in _ELSEWHERE.items():
        notes[name] = f"there is no flag {name}: here it is {ours}"
    for name, strategy in STRATEGIES.items():
        if name not in sync_choices:
            use = strategy.part if name == "none" else f"{strategy.part} --sync {name}"
            notes[f"--sync {name}"] = f"--sync: {part} has no {name!r}. Use {use}"
    return notes


def build_parser(
    part: str,
    description: str,
    sync_choices: Sequence[str],
    *,
    program: str | None = None,
    show_all: bool = True,
) -> argparse.ArgumentParser:
    """Return a parser of the part's flags; its namespace holds only the flags that are given.

    Its help shows only the basic flags unless ``show_all``. ``sync_choices`` limits ``--sync``; a
    part whose only choice is "none" trains on one process and has no flags for several.
    """
    parser = FlagParser(
        prog=program or f"{part}/main.py",
        usage=f"{program or f'python {part}/main.py'} [FLAG ...]",
        description=description,
        allow_abbrev=False,
        add_help=False,
        formatter_class=_PartFormatter,
        argument_default=argparse.SUPPRESS,
    )
    notes = _foreign_flags(part, sync_choices)
    groups = {
        heading: parser.add_argument_group(heading)
        for heading in (CLUSTER, TRAINING, OPTIMIZER, DATA, RUN, RECIPE)
    }
    trains_alone = tuple(sync_choices) == ("none",)
    for name, known in settings().items():
        flags = _all_flags(name, known)
        if trains_alone and (name == "sync" or known.group == CLUSTER):
            for alias in flags:
                notes[alias] = _ONE_PROCESS.format(part=part, flag=alias)
            continue
        if name == "sync":
            known = replace(known, choices=sync_choices, default=sync_choices[0])
        is_shown = show_all or name in _BASIC
        _add_flag(groups[known.group], name, flags, known, hidden=not is_shown)
    parser.notes = notes
    group = parser.add_argument_group("help")
    group.add_argument("-h", "--help", action="help", help="show the basic flags and exit")
    group.add_argument("--help-all", action="help", help="show all flags and exit")
    return parser


def _all_flags(name: str, known: Setting) -> list[str]:
    """Return the short names of a setting's flag, its own, then its other long names."""
    short = [alias for alias in known.flags if not alias.startswith("--")]
    long = [alias for alias in known.flags if alias.startswith("--")]
    return [*short, flag(name), *long]


def _add_flag(
    group: "argparse._ArgumentGroup",
    name: str,
    flags: Sequence[str],
    known: Setting,
    *,
    hidden: bool,
) -> None:
    """Add the flags of a setting; ``hidden`` ones are taken, but not in the help."""
    kind = known.kind
    if kind is bool:
        _add_switch(group, name, flags, known, hidden=hidden)
        return
    details = []
    if known.choices:
        details.append(f"one of {', '.join(known.choices)}")
    if known.default is not None:
        details.append(f"default: {known.default}")
    text = known.help
    if details:
        text += f" ({'; '.join(details)})"
    group.add_argument(
        *flags,
        dest=name,
        help=argparse.SUPPRESS if hidden else text,
        type=_path if kind is Path else kind,
        choices=known.choices,
        metavar="NAME" if known.choices else _METAVARS.get(name, _METAVARS[kind]),
    )


def _add_switch(
    group: "argparse._ArgumentGroup",
    name: str,
    flags: Sequence[str],
    known: Setting,
    *,
    hidden: bool,
) -> None:
    """Add a flag without a value, and its opposite.

    The help shows the one that changes the default, and both where the default depends.
    """
    on = off = argparse.SUPPRESS
    if not hidden and not known.default:
        on = known.help
    if not hidden and known.default is None:
        off = f"the opposite of {flags[0]}"
    if not hidden and known.default:
        off = f"switch off: {known.help}"
    negated = ["--no-" + long.removeprefix("--") for long in flags if long.startswith("--")]
    group.add_argument(*flags, dest=name, action="store_true", help=on)
    group.add_argument(*negated, dest=name, action="store_false", help=off)


def parse_arguments(
    part: str,
    description: str,
    sync_choices: Sequence[str],
    arguments: Sequence[str],
    *,
    program: str | None = None,
) -> Config:
    """Return the settings of ``part``, which ``program`` starts (default: its main.py).

    An underscore in a flag equals a dash. A flag wins over the recipe, and a recipe over the
    defaults. Raises UserError if a flag, the recipe or a value is wrong.
    """
    dashed = [re.sub("^--[^=]*", lambda name: name[0].replace("_", "-"), a) for a in arguments]
    parser = build_parser(
        part, description, sync_choices, program=program, show_all="--help-all" in dashed
    )
    given = vars(parser.parse_args(dashed))
    values: dict[str, Any] = {"sync": sync_choices[0]}
    if given.get("recipe") is not None:
        path = find_recipe(given["recipe"])
        values |= read_recipe(path)
        if values["sync"] not in sync_choices:
            raise UserError(
                f"recipe {path}: sync = {values['sync']!r}, but {part} offers "
                f"{', '.join(sync_choices)}"
            )
        try:
            Config(part=part, **values)
        except UserError as error:
            raise UserError(f"recipe {path}: {error}") from error
    replaced = {_IN_PLACE_OF.get(name) for name in given}
    kept = {name: value for name, value in values.items() if name not in replaced}
    if given.get("measure_only"):  # nothing is evaluated, whatever the recipe does
        kept |= {"validate": False, "target_accuracy": None}
    return Config(part=part, **kept | given)
