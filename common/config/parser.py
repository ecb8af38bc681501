"""From a command line to a ``Config``: the flags are its fields."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from common.config.recipes import find_recipe, read_recipe
from common.config.schema import CLUSTER, Config, flag
from common.errors import UserError

_IN_PLACE_OF = {
    "batch_size": ("local_batch_size",),
    "local_batch_size": ("batch_size",),
    "epochs": ("max_steps",),
    "warmup_steps": ("warmup_epochs",),
    "warmup_epochs": ("warmup_steps",),
}
"""A flag replaces the recipe's setting of the other name."""


class OneLineErrorParser(argparse.ArgumentParser):
    """argparse that reports an error in one line, as UserError, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists the flags)")


def _number(kind: type, expected: str) -> Any:
    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, give {expected}") from None

    return convert


def _path(text: str) -> Path:
    if not text:  # Path("") would be the current folder
        raise argparse.ArgumentTypeError("got '', give a path or leave the flag out")
    return Path(text)


_CONVERT = {
    int: _number(int, "a whole number"),
    float: _number(float, "a number"),
    Path: _path,
    str: str,
}


def build_parser(
    part: str,
    description: str,
    defaults: Mapping[str, Any],
    sync_choices: Sequence[str],
    *,
    program: str | None = None,
) -> argparse.ArgumentParser:
    """The part's flags, in groups; ``defaults`` are shown in place of the dataclass's, ``sync_choices`` limit ``--sync``.

    A namespace that it parses holds the given flags only.
    """
    parser = OneLineErrorParser(
        prog=program or f"{part}/main.py",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, Any] = {}
    distributed = tuple(sync_choices) != ("none",)
    for spec in fields(Config):
        rules = spec.metadata
        hidden = (spec.name == "sync" and len(sync_choices) == 1) or (
            rules and rules["group"] == CLUSTER and not distributed
        )
        if not rules or hidden:
            continue
        if rules["group"] not in groups:
            groups[rules["group"]] = parser.add_argument_group(rules["group"])
        group = groups[rules["group"]]
        default = defaults.get(spec.name, sync_choices[0] if spec.name == "sync" else spec.default)
        without_default = default is None or rules["type"] is bool
        help_text = rules["help"] + ("" if without_default else f" (default: {default})")
        names = [
            *(f for f in rules["flags"] if not f.startswith("--")),
            flag(spec.name),
            *(f for f in rules["flags"] if f.startswith("--")),
        ]
        shown = {"dest": spec.name, "help": help_text}
        if rules["type"] is bool:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **shown)
            continue
        choices = sync_choices if spec.name == "sync" else rules["choices"]
        group.add_argument(
            *names,
            type=_CONVERT[rules["type"]],
            choices=choices,
            metavar=None if choices else spec.name.upper(),
            **shown,
        )
    return parser


def parse_arguments(
    part: str,
    description: str,
    defaults: Mapping[str, Any],
    sync_choices: Sequence[str],
    arguments: Sequence[str],
    *,
    program: str | None = None,
) -> Config:
    """Return the settings of ``part``, which ``program`` starts (default: its main.py); an
    underscore in a flag equals a dash. UserError on anything wrong."""
    parser = build_parser(part, description, defaults, sync_choices, program=program)
    given = vars(parser.parse_args([_with_dashes(argument) for argument in arguments]))
    settings = {"sync": sync_choices[0], **defaults}
    if given.get("recipe") is not None:
        path = find_recipe(given["recipe"])
        settings |= read_recipe(path)
        if settings["sync"] not in sync_choices:
            raise UserError(
                f"recipe {path}: sync = {settings['sync']!r}, but {part} offers {', '.join(sync_choices)}"
            )
        try:
            Config(part=part, **settings)
        except UserError as error:
            raise UserError(f"recipe {path}: {error}") from error
    for name in given:
        for other in _IN_PLACE_OF.get(name, ()):
            settings.pop(other, None)
    return Config(part=part, **settings | given)


def _with_dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
