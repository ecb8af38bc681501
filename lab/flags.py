"""How ``lab``'s subcommands are made: each with its help, and what it runs."""

import argparse


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Tells the default of what has one; "(default: None)" tells nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return (
            action.help if action.default in (None, False, []) else super()._get_help_string(action)
        )


def add_command(
    commands: argparse._SubParsersAction, name: str, *, run: object, help: str
) -> argparse.ArgumentParser:
    """Add a subcommand that calls ``run`` with its flags, and return its parser."""
    parser = commands.add_parser(
        name, help=help, description=help, allow_abbrev=False, formatter_class=_Help
    )
    parser.set_defaults(run=run)
    return parser
