"""Create the subcommands of ``lab``, each with its help and its function."""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any

from common.config.parser import FlagFormatter


class _Help(FlagFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Show the defaults of flags that have one, and no "(default: None)"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, []):
            return action.help
        return super()._get_help_string(action)


def add_command(
    commands: argparse._SubParsersAction,
    name: str,
    *,
    run: Callable[[argparse.Namespace], int] | str,
    help: str,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    passes_flags: bool = False,
) -> argparse.ArgumentParser:
    """Add a subcommand that calls ``run`` with its flags, and return its parser.

    run : a function, or "module:function", which is imported when the command is called.
    help : a clause without a full stop; the list of commands shows it up to the first semicolon.
    flags : see ``add_flags``.
    passes_flags : whether the command takes what follows ``--``.
    """
    parser = commands.add_parser(
        name,
        help=help.partition(";")[0],
        description=f"{help[:1].upper()}{help[1:]}.",
        allow_abbrev=False,
        formatter_class=_Help,
    )
    function = partial(_run_imported, run) if isinstance(run, str) else run
    parser.set_defaults(run=function, passes_flags=passes_flags)
    add_flags(parser, flags or {})
    return parser


def add_flags(parser: argparse._ActionsContainer, flags: Mapping[str, Mapping[str, Any]]) -> None:
    """Add flags to a parser: names, e.g. "-R --rank", with their arguments of ``add_argument``."""
    for names, options in flags.items():
        parser.add_argument(*names.split(), **options)


def _run_imported(target: str, args: argparse.Namespace) -> int:
    return resolve_name(target)(args)
