"""Create the subcommands of ``lab``, each with its help and the function that it runs."""

import argparse
from collections.abc import Callable


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of flags that have one, and no "(default: None)"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, []):
            return action.help
        return super()._get_help_string(action)


def add_command(
    commands: argparse._SubParsersAction,
    name: str,
    *,
    run: Callable[[argparse.Namespace], int],
    help: str,
) -> argparse.ArgumentParser:
    """Add a subcommand that calls ``run`` with its flags, and return its parser."""
    parser = commands.add_parser(
        name, help=help, description=help, allow_abbrev=False, formatter_class=_Help
    )
    parser.set_defaults(run=run)
    return parser
