"""Turn a command line, and the recipe that it names, into a ``Config``."""

import argparse
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn

from common.config.recipes import find_recipe, read_recipe
from common.config.schema import CLUSTER, EXPECTED, Config, flag
from common.errors import UserError

_IN_PLACE_OF = {
    "batch_size": "local_batch_size",
    "local_batch_size": "batch_size",
    "epochs": "max_steps",
    "warmup_steps": "warmup_epochs",
    "warmup_epochs": "warmup_steps",
}
"""A flag replaces the recipe's setting of the other name."""


class OneLineErrorParser(argparse.ArgumentParser):
    """Raises an error as a UserError of one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists the flags)")


def _convert(kind: type, text: str) -> Any:
    with contextlib.suppress(ValueError):
        if text or kind is str:  # Path("") would be the current folder
            return kind(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, give {EXPECTED[kind]}")


def build_parser(
    part: str,
    description: str,
    defaults: Mapping[str, Any],
    sync_choices: Sequence[str],
    *,
    program: str | None = None,
) -> argparse.ArgumentParser:
    """Return a parser of the part's flags; its namespace holds only the flags that are given.

    ``--help`` shows ``defaults`` in place of those of ``Config``; ``sync_choices`` limits
    ``--sync``.
    """
    parser = OneLineErrorParser(
        prog=program or f"{part}/main.py",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    distributed = tuple(sync_choices) != ("none",)
    shown = [
        spec
        for spec in fields(Config)
        if spec.metadata
        and (spec.name != "sync" or len(sync_choices) > 1)
        and (spec.metadata["group"] != CLUSTER or distributed)
    ]
    groups = {
        name: parser.add_argument_group(name)
        for name in dict.fromkeys(spec.metadata["group"] for spec in shown)
    }
    shown_defaults = {"sync": sync_choices[0], **defaults}
    for spec in shown:
        rules = {**spec.metadata, **({"choices": sync_choices} if spec.name == "sync" else {})}
        default = shown_defaults.get(spec.name, spec.default)
        _add_flag(groups[rules["group"]], spec.name, default, rules)
    return parser


def _add_flag(
    group: "argparse._ArgumentGroup", name: str, default: Any, rules: Mapping[str, Any]
) -> None:
    """Add a setting's flag: first its short names, then its own, then its other long names."""
    kind, choices = rules["type"], rules["choices"]
    flags = sorted([flag(name), *rules["flags"]], key=lambda one: one.startswith("--"))
    without_default = default is None or kind is bool
    help_text = rules["help"] + ("" if without_default else f" (default: {default})")
    convert: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if kind is not bool:
        metavar = None if choices else name.upper()
        convert = {"type": partial(_convert, kind), "choices": choices, "metavar": metavar}
    group.add_argument(*flags, dest=name, help=help_text, **convert)


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
    parser = build_parser(part, description, defaults, sync_choices, program=program)
    dashed = [re.sub("^--[^=]*", lambda name: name[0].replace("_", "-"), a) for a in arguments]
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
