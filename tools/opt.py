"""`flambeau opt`: run passes, Python's and C++'s, over MLIR from a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "run a pass pipeline over an MLIR file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("file", metavar="FILE", help="MLIR text or bytecode; - is standard input")
    parser.add_argument(
        "--pass-pipeline",
        required=True,
        metavar="PIPELINE",
        help="a named pipeline, or MLIR's syntax: 'builtin.module(canonicalize,cse)'",
    )
    parser.add_argument("-o", dest="output", metavar="OUT", help="default: standard output")


def run(options: argparse.Namespace) -> int:
    """Print the module after the pipeline; 1, with the diagnostics, when something fails."""
    from torch_mlir import ir

    from ..dialects.context import make_context
    from ..passes.manager import run as run_pipeline

    source = sys.stdin.buffer.read() if options.file == "-" else Path(options.file).read_bytes()
    try:
        module = ir.Module.parse(source, make_context())
        run_pipeline(module, options.pass_pipeline)
    except (ir.MLIRError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.output is None:
        print(module)
    else:
        Path(options.output).write_text(f"{module}\n")
    return 0
