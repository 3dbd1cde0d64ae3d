"""`flambeau bench`: backends side by side on real models, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .bench_process import Worker, WorkerFailed
from .bench_report import SCHEMA, environment, summarize, table

HELP = "compare eager PyTorch, Inductor and Flambeau on real models"
BUSY = 0.7
"""Load average above which a warning is due."""
DEFAULT_BACKENDS = "eager,inductor,flambeau"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How to measure. `threads` None leaves the number to PyTorch; times are in seconds."""

    size: str = "full"
    threads: int | None = None
    rounds: int = 5
    round_seconds: float = 1.0
    least_samples: int = 3
    timeout: float = 900.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    defaults = Settings()
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all; see --list")
    parser.add_argument("--list", action="store_true", help="list models and backends, and end")
    parser.add_argument(
        "--against", default=DEFAULT_BACKENDS, metavar="A,B", help=f"default: {DEFAULT_BACKENDS}"
    )
    parser.add_argument("--size", choices=("small", "full"), default=defaults.size)
    parser.add_argument("--threads", type=int, metavar="N", help="default: PyTorch's own choice")
    parser.add_argument("--rounds", type=int, default=defaults.rounds, metavar="N")
    parser.add_argument("--round-seconds", type=float, default=defaults.round_seconds, metavar="S")
    parser.add_argument("--timeout", type=float, default=defaults.timeout, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 when a model or backend is unknown, 0 whatever fails after that."""
    from .bench_backends import BACKENDS
    from .models import MODELS

    backends = list(dict.fromkeys(options.against.split(",")))
    models = options.models or list(MODELS)
    if options.list:
        print("models:  ", *MODELS)
        print("backends:", *BACKENDS)
        return 0
    for kind, given, known in (("model", models, MODELS), ("backend", backends, BACKENDS)):
        for name in given:
            if name not in known:
                print(f"unknown {kind} {name!r}; there are: {', '.join(known)}", file=sys.stderr)
                return 1
    console = Console()
    if (load := os.getloadavg()[0]) > BUSY:
        console.print(f"The machine is busy (load {load:.1f}): times will be off.", style="yellow")
    settings = Settings(
        size=options.size,
        threads=options.threads,
        rounds=options.rounds,
        round_seconds=options.round_seconds,
        timeout=options.timeout,
    )
    report = bench(models, backends, settings, console)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def bench(
    models: Sequence[str], backends: Sequence[str], settings: Settings, console: Console
) -> dict[str, Any]:
    """Measure each model, printing its table as soon as it is done; everything as plain data."""
    found: dict[str, Any] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        steps = 1 + len(backends) * (1 + settings.rounds)
        task = progress.add_task("", total=steps * len(models))
        for i, model in enumerate(models):

            def tell(what: str, model: str = model) -> None:
                progress.update(task, description=f"{model}: {what}", advance=1)

            found[model] = bench_model(model, backends, settings, tell)
            progress.update(task, completed=steps * (i + 1))
            console.print(table(model, found[model]))
    return {
        "schema": SCHEMA,
        **environment(),
        "settings": asdict(settings),
        "models": found,
    }


def bench_model(
    model: str,
    backends: Sequence[str],
    settings: Settings,
    tell: Tell = lambda _: None,
    inspect: Callable[[dict[str, Worker]], None] = lambda _: None,
) -> dict[str, Any]:
    """One model on each backend: compile one after the other, then measure in turns.

    `inspect` gets the workers that are left in between.
    """
    with tempfile.TemporaryDirectory(prefix="flambeau-bench-") as root, ExitStack() as stack:
        what = {"model": model, "size": settings.size, "file": os.path.join(root, "expected.pt")}
        tell("float64 reference")
        try:
            with Worker(root, "reference", settings.threads) as worker:
                reference = worker.ask("reference", settings.timeout, **what)
        except WorkerFailed as failure:
            return {"reason": failure.reason, "traceback": failure.details, "backends": {}}
        workers: dict[str, Worker] = {}
        results: dict[str, Any] = {}

        def attempt(name: str, do: str, **arguments: Any) -> dict[str, Any]:
            try:
                return workers[name].ask(do, settings.timeout, **arguments)
            except WorkerFailed as failure:
                workers.pop(name).__exit__()
                return {
                    "status": "failed",
                    "reason": failure.reason,
                    "traceback": failure.details,
                }

        for backend in backends:
            tell(f"{backend} compiles")
            workers[backend] = stack.enter_context(Worker(root, backend, settings.threads))
            results[backend] = {"status": "ok", "rounds_s": []}
            results[backend] |= attempt(backend, "compile", backend=backend, **what)
        inspect(workers)
        budget = {"seconds": settings.round_seconds, "least": settings.least_samples}
        for i in range(settings.rounds):
            for backend in list(workers):
                tell(f"round {i + 1} of {settings.rounds}, {backend}")
                reply = attempt(backend, "measure", **budget)
                if "samples_s" in reply:
                    results[backend]["rounds_s"].append(reply["samples_s"])
                else:
                    results[backend] |= reply
    eager_error = reference.pop("error")
    return reference | {
        "eager_error": eager_error,
        "backends": summarize(results, eager_error),
    }
