"""`make demo`: one real model compiled, checked against float64 and timed beside eager PyTorch."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from .bench import Settings, bench_model
from .bench_process import Worker

MODEL = "bert-base"
SETTINGS = Settings(rounds=3, round_seconds=1.0)
IR_LINES = 14

_CODE = """\
import flambeau, transformers

model = transformers.BertModel(transformers.BertConfig()).eval()
fast = flambeau.compile_module(model, (input_ids, attention_mask))
output = fast(input_ids, attention_mask)"""


def main() -> int:
    """Show it; 1 when the model could not be compiled."""
    console = Console()
    start = time.perf_counter()
    ir: list[str] = []

    def read_ir(workers: Mapping[str, Worker]) -> None:
        if "flambeau" in workers:
            ir.extend(workers["flambeau"].ask("ir", 60, stage="torch", lines=IR_LINES)["lines"])

    console.print(Panel(Syntax(_CODE, "python", background_color="default"), title="Flambeau"))
    console.print("BERT-base with random weights, eager and compiled in processes of their own:")
    with console.status("starting") as status:
        backends = ["eager", "flambeau"]
        found = bench_model(MODEL, backends, SETTINGS, status.update, read_ir)
    if "reason" in found:
        console.print(f"no reference: {found['reason']}", style="red")
        return 1
    for name, result in found["backends"].items():
        if result["status"] != "ok":
            console.print(f"{name} failed: {result['reason']}", style="red")
            return 1
    _report(console, found)
    console.print("\nThe same model as it enters the pass pipelines:", style="bold")
    for line in ir:
        console.print(Text(line, style="cyan"), no_wrap=True, overflow="ellipsis")
    console.print(
        f"\n{time.perf_counter() - start:.0f} seconds in all. Next: [b]flambeau bench[/b]"
    )
    return 0


def _report(console: Console, found: Mapping[str, Any]) -> None:
    eager, fast = found["backends"]["eager"], found["backends"]["flambeau"]
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in fast["stages_s"].items())
    medians = [result["summary"]["median_s"] * 1000 for result in (eager, fast)]
    speedup = fast["summary"]["speedup"]["eager"]
    rows = (
        ("compiled in", f"{fast['compile_s']:.1f} s", stages),
        ("left to eager", f"{len(fast['fallbacks'])} operators", ""),
        (
            "error",
            f"{fast['error']:.1e}",
            f"against float64; eager float32's is {eager['error']:.1e}",
        ),
        ("time of a call", f"{medians[1]:.1f} ms", f"eager {medians[0]:.1f} ms; medians"),
        (
            "speed",
            f"{speedup['median']:.2f} x eager",
            f"{speedup['min']:.2f} to {speedup['max']:.2f}, {found['threads']} threads",
        ),
    )
    console.print()
    for what, figure, note in rows:
        console.print(
            Text.assemble((f"  {what:<16}", ""), (f"{figure:<14}", "bold"), (note, "dim"))
        )


if __name__ == "__main__":
    sys.exit(main())
