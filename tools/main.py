"""The `flambeau` command: joins the subcommands, each in a file of its own.

A subcommand's file has HELP, `add_arguments(parser)` and `run(options)`, which returns the exit
code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import FlambeauError
from . import bench, opt, targets

COMMANDS = {"bench": bench, "opt": opt, "targets": targets}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the command line names."""
    parser = argparse.ArgumentParser(prog="flambeau", description="A compiler stack for PyTorch")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.HELP, description=command.__doc__)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except (FlambeauError, OSError) as error:
        print(f"flambeau: {error}", file=sys.stderr)
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
