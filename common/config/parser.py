"""Turn a command line, and the recipe that it names, into a ``Config``.

``FlagParser`` is also the parser of the ``lab`` commands.
"""

import argparse
import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from common.config.recipes import find_recipe, read_recipe
from common.config.schema import (
    CLUSTER,
    DATA,
    EXPECTED,
    OPTIMIZER,
    RECIPE,
    RUN,
    TRAINING,
    Config,
    flag,
    or_word,
)
from common.errors import UserError
from common.sync import BUILT_IN, BY_HAND
from common.utils.registry import choices_text, closest

_IN_PLACE_OF = {
    "batch_size": "local_batch_size",
    "local_batch_size": "batch_size",
    "epochs": "max_steps",
    "warmup_steps": "warmup_epochs",
    "warmup_epochs": "warmup_steps",
}
"""A flag replaces the recipe's setting of the other name."""

_BASIC = (
    *("recipe", "sync", "master_ip", "num_nodes", "rank", "distributed", "dataset", "data_dir"),
    *("epochs", "max_steps", "batch_size", "learning_rate", "seed", "resume"),
)
"""The settings that --help shows; --help-all shows every one."""

_HEADINGS = (CLUSTER, TRAINING, OPTIMIZER, DATA, RUN, RECIPE)
_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
_METAVARS |= {"master_ip": "ADDRESS", "dist_url": "URL", "mirror": "URL", "resume": "PATH"}
_METAVARS |= {"recipe": "NAME", "run_name": "NAME", "gpu_ids": "IDS"}
_PART_OF_SYNC = {
    "none": "PartOne",
    **dict.fromkeys(BY_HAND, "PartTwo"),
    **dict.fromkeys(BUILT_IN, "PartThree"),
}


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
        args = sys.argv[1:] if args is None else args
        if not args and self._subparsers is not None:
            self.print_help(sys.stderr)
            self.exit(2)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(next((one for one in unknown if one.startswith("-")), unknown[0]))
        return namespace, unknown

    def _refuse(self, unknown: str) -> NoReturn:
        name = unknown.partition("=")[0]
        if name in self.notes:
            raise UserError(self.notes[name])
        if not name.startswith("-"):
            self.error(f"unexpected argument {unknown!r}")
        known = [one for one in self._option_string_actions if re.match("--(?!no-)", one)]
        close = closest(name, [*known, *self.notes])
        if close is None:
            self.error(f"there is no flag {name}")
        hint = f"there is no flag {name}: did you mean {close}?"
        if close in self.notes:
            raise UserError(f"{hint} {self.notes[close]}")
        self.error(hint)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            listed = choices_text(value, action.choices)
            raise UserError(f"{self.prog}: there is no command {value!r}: {listed}")
        name = next((one for one in action.option_strings if one.startswith("--")), action.metavar)
        if note := self.notes.get(f"{name} {value}"):
            raise UserError(note)
        listed = choices_text(str(value), map(str, action.choices))
        raise UserError(f"{name}: got {value!r}, {listed}")


def _convert(rules: Mapping[str, Any], text: str) -> Any:
    kind = rules["type"]
    if text == rules["word"]:
        return text
    with contextlib.suppress(ValueError):
        if text or kind is str:  # Path("") would be the current folder
            return kind(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, give {EXPECTED[kind]}{or_word(rules)}")


def build_parser(
    part: str,
    description: str,
    defaults: Mapping[str, Any],
    sync_choices: Sequence[str],
    *,
    program: str | None = None,
    show_all: bool = True,
) -> argparse.ArgumentParser:
    """Return a parser of the part's flags; its namespace holds only the flags that are given.

    Its help shows ``defaults`` in place of those of ``Config``, and only the basic flags unless
    ``show_all``. ``sync_choices`` limits ``--sync``.
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
    parser.notes = _notes(part, sync_choices)
    shown = [spec for spec in fields(Config) if spec.metadata and _has(spec, sync_choices)]
    groups = {heading: parser.add_argument_group(heading) for heading in _HEADINGS}
    shown_defaults = {"sync": sync_choices[0], **defaults}
    for spec in shown:
        rules = {**spec.metadata, **({"choices": sync_choices} if spec.name == "sync" else {})}
        if not show_all and spec.name not in _BASIC:
            rules["help"] = argparse.SUPPRESS
        default = shown_defaults.get(spec.name, spec.default)
        _add_flag(groups[rules["group"]], spec.name, default, rules)
    group = parser.add_argument_group("help")
    group.add_argument("-h", "--help", action="help", help="show the basic flags and exit")
    group.add_argument("--help-all", action="help", help=f"show all {len(shown)} flags and exit")
    return parser


def _has(spec: "Field[Any]", sync_choices: Sequence[str]) -> bool:
    """Return whether a part with these strategies has the flag."""
    if spec.name == "sync":
        return len(sync_choices) > 1
    return spec.metadata["group"] != CLUSTER or tuple(sync_choices) != ("none",)


def _notes(part: str, sync_choices: Sequence[str]) -> dict[str, str]:
    """Return what to say about flags, and about values of --sync, that other parts have."""
    notes = {
        f"--sync {name}": f"--sync: {part} has no {name!r}. Use {owner}"
        + ("" if name == "none" else f" --sync {name}")
        for name, owner in _PART_OF_SYNC.items()
        if name not in sync_choices
    }
    if tuple(sync_choices) == ("none",):
        for spec in fields(Config):
            if spec.metadata and not _has(spec, sync_choices):
                for name in (flag(spec.name), *spec.metadata["flags"]):
                    notes[name] = (
                        f"{part} has no {name}: it trains on one process. PartTwo and PartThree "
                        "train on several"
                    )
    return notes


def _add_flag(
    group: "argparse._ArgumentGroup", name: str, default: Any, rules: Mapping[str, Any]
) -> None:
    """Add a setting's flag: first its short names, then its own, then its other long names."""
    kind, choices, help_text = rules["type"], rules["choices"], rules["help"]
    flags = sorted([flag(name), *rules["flags"]], key=lambda one: one.startswith("--"))
    if kind is bool:
        # --no-x is only worth reading where x is, or may be, on by default.
        negated = ["--no-" + one.removeprefix("--") for one in flags if one.startswith("--")]
        shown, other = (negated, flags) if default else (flags, negated)
        other_help = f"the opposite of {shown[0]}" if default is None else argparse.SUPPRESS
        if help_text is argparse.SUPPRESS:
            other_help = help_text
        for names, text in ((shown, help_text), (other, other_help)):
            action = "store_true" if names is flags else "store_false"
            group.add_argument(*names, dest=name, action=action, help=text)
        return
    details = [f"one of {', '.join(choices)}"] if choices else []
    details += [f"default: {default}"] if default is not None else []
    if details and help_text is not argparse.SUPPRESS:
        help_text += f" ({'; '.join(details)})"
    group.add_argument(
        *flags,
        dest=name,
        help=help_text,
        type=partial(_convert, rules),
        choices=choices,
        metavar="NAME" if choices else _METAVARS.get(name, _METAVARS[kind]),
    )


def parse_arguments(
    part: str,
    description: str,
    defaults: Mapping[str, Any],
    sync_choices: Sequence[str],
    arguments: Sequence[str],
    *,
    program: str | None = None,
) -> Config:
    """Return the settings of ``part``, which ``program`` starts (default: its main.py).

    An underscore in a flag equals a dash. A flag wins over the recipe, and a recipe over
    ``defaults``. Raises UserError if a flag, the recipe or a value is wrong.
    """
    dashed = [re.sub("^--[^=]*", lambda name: name[0].replace("_", "-"), a) for a in arguments]
    parser = build_parser(
        part,
        description,
        defaults,
        sync_choices,
        program=program,
        show_all="--help-all" in dashed,
    )
    given = vars(parser.parse_args(dashed))
    settings = {"sync": sync_choices[0], **defaults}
    if given.get("recipe") is not None:
        path = find_recipe(given["recipe"])
        settings |= read_recipe(path)
        if settings["sync"] not in sync_choices:
            raise UserError(
                f"recipe {path}: sync = {settings['sync']!r}, but {part} offers "
                f"{', '.join(sync_choices)}"
            )
        try:
            Config(part=part, **settings)
        except UserError as error:
            raise UserError(f"recipe {path}: {error}") from error
    replaced = {_IN_PLACE_OF.get(name) for name in given}
    kept = {name: value for name, value in settings.items() if name not in replaced}
    return Config(part=part, **kept | given)
