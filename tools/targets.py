"""`flambeau targets`: what Flambeau compiles for."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from ..runtime.targets import TARGETS

HELP = "list the targets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command: it has none."""


def run(options: argparse.Namespace) -> int:
    """Print a table of the targets."""
    table = Table("target", "device", "on the calling thread")
    table.add_column("flags for IREE", overflow="fold")
    for target in TARGETS.values():
        table.add_row(target.name, target.device, target.inline_device, "\n".join(target.flags))
    Console().print(table)
    return 0
