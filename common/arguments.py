"""From a command line to a ``Config``: the flags of its fields, and recipes.

``parse_arguments`` is the one function. What a flag says wins over the recipe, and this over the part's own defaults.
"""

import argparse
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from common.config import CLUSTER, REPOSITORY, Config, flag
from common.errors import UserError

RECIPES = REPOSITORY / "recipes"
_IN_PLACE_OF = {"batch_size": ("local_batch_size",), "local_batch_size": ("batch_size",), "epochs": ("max_steps",),
                "warmup_steps": ("warmup_epochs",), "warmup_epochs": ("warmup_steps",)}
"""A flag puts aside what the recipe says by the other name."""


class _Parser(argparse.ArgumentParser):
    """argparse without the page of usage before each error."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists the flags)")


def _number(kind: type, words: str) -> Any:
    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, give {words}") from None
    return convert


def _path(text: str) -> Path:
    if not text:  # Path("") would be the current folder
        raise argparse.ArgumentTypeError("got '', give a path or leave the flag out")
    return Path(text)


_CONVERT = {int: _number(int, "a whole number"), float: _number(float, "a number"), Path: _path, str: str}


def build_parser(part: str, description: str, defaults: Mapping[str, Any],
                 sync_choices: Sequence[str]) -> argparse.ArgumentParser:
    """The part's flags, in groups; ``defaults`` are shown in place of the dataclass's, ``sync_choices`` limit ``--sync``.

    A namespace that it parses holds the given flags only.
    """
    parser = _Parser(prog=f"{part}/main.py", description=description, allow_abbrev=False,
                     formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)
    groups: dict[str, Any] = {}
    distributed = tuple(sync_choices) != ("none",)
    for spec in fields(Config):
        rules = spec.metadata
        hidden = (spec.name == "sync" and len(sync_choices) == 1) or (
            rules and rules["group"] == CLUSTER and not distributed)
        if not rules or hidden:
            continue
        if rules["group"] not in groups:
            groups[rules["group"]] = parser.add_argument_group(rules["group"])
        group = groups[rules["group"]]
        default = defaults.get(spec.name, sync_choices[0] if spec.name == "sync" else spec.default)
        help_text = rules["help"] + ("" if default is None or rules["type"] is bool else f" (default: {default})")
        names = [*(f for f in rules["flags"] if not f.startswith("--")), flag(spec.name),
                 *(f for f in rules["flags"] if f.startswith("--"))]
        shown = {"dest": spec.name, "help": help_text}
        if rules["type"] is bool:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **shown)
            continue
        choices = sync_choices if spec.name == "sync" else rules["choices"]
        group.add_argument(*names, type=_CONVERT[rules["type"]], choices=choices,
                           metavar=None if choices else spec.name.upper(), **shown)
    return parser


def parse_arguments(part: str, description: str, defaults: Mapping[str, Any], sync_choices: Sequence[str],
                    arguments: Sequence[str]) -> Config:
    """Return the settings of ``part``; an underscore in a flag equals a dash. UserError on anything wrong."""
    parser = build_parser(part, description, defaults, sync_choices)
    given = vars(parser.parse_args([_dashes(argument) for argument in arguments]))
    settings = {"sync": sync_choices[0], **defaults}
    if given.get("recipe") is not None:
        path = find_recipe(given["recipe"])
        settings |= read_recipe(path)
        if settings["sync"] not in sync_choices:
            raise UserError(f"recipe {path}: sync = {settings['sync']!r}, but {part} offers {', '.join(sync_choices)}")
        try:
            Config(part=part, **settings)
        except UserError as error:
            raise UserError(f"recipe {path}: {error}") from error
    for name in given:
        for other in _IN_PLACE_OF.get(name, ()):
            settings.pop(other, None)
    return Config(part=part, **settings | given)


def find_recipe(name: str) -> Path:
    """Return the file of a recipe that is given by name or path; UserError with the choices where there is none."""
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    if not path.is_file():
        known = sorted(recipe.stem for recipe in RECIPES.glob("*.toml"))
        raise UserError(f"--recipe: there is no {path}; choose one of {', '.join(known)}, or give a file that ends in .toml")
    return path


def read_recipe(path: Path) -> dict[str, Any]:
    """Return a recipe's settings by field name. UserError on a key that is unknown or not for recipes, and on a value of
    another type; ``Config`` checks the rest."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no TOML, no UTF-8, a number of 5000 digits
        raise UserError(f"recipe {path} cannot be read: {error}") from error
    specs = {spec.name: spec.metadata for spec in fields(Config) if spec.metadata and spec.metadata["in_recipe"]}
    settings = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in specs:
            close = difflib.get_close_matches(name, specs, n=1)
            hint = f"did you mean {close[0]}?" if close else "--print-config shows the keys"
            raise UserError(f"recipe {path}: unknown key {key!r}; {hint}")
        kind = specs[name]["type"]
        wanted = {int: (int,), float: (int, float), bool: (bool,), str: (str,), Path: (str,)}[kind]
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
            words = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a text in quotes")
            raise UserError(f"recipe {path}: {key} = {value!r}, give {words}")
        settings[name] = Path(value) if kind is Path else float(str(value)) if kind is float else value  # str: 10**400 is inf
    return settings


def print_recipe(config: Config) -> str:
    """Return every setting that a recipe can hold as the text of one; those that are not set stand as comments."""
    groups: dict[str, list[str]] = {}
    for spec in fields(Config):
        if spec.metadata and spec.metadata["in_recipe"]:
            value = getattr(config, spec.name)
            groups.setdefault(spec.metadata["group"], []).append(
                f"# {spec.name} is not set" if value is None else f"{spec.name} = {_toml(value)}")
    lines = [f"# {config.part}" + (f", recipe {config.recipe}" if config.recipe else "")]
    for group, entries in groups.items():
        lines += ["", f"# {group}", *entries]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)  # TOML's basic strings escape as JSON's do


def _dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
