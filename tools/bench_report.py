"""What `flambeau bench` says: figures from samples, a table, the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

SCHEMA = 1
"""Version of the JSON: raised when a key changes its meaning or goes away."""

BASELINES = ("eager", "inductor")
"""What every backend's speed is put in relation to."""

_PACKAGES = (
    "flambeau",
    "torch",
    "torch-mlir",
    "iree-base-compiler",
    "iree-base-runtime",
    "transformers",
)


def environment() -> dict[str, Any]:
    """The machine, and the versions of what was measured."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        versions[name] = importlib.metadata.version(name)
    machine = {
        "load_1min": os.getloadavg()[0],
        "cpu": _cpu(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    return {"machine": machine, "versions": versions}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def summarize(results: Mapping[str, Any], eager_error: float) -> dict[str, Any]:
    """The results of one model's backends, each with a summary of its samples.

    A speed-up is the median, over the rounds, of the baseline's time in that round by the
    backend's: what changes slowly on the machine cancels out.
    """
    return {
        name: result | {"summary": _summary(result, results, eager_error)}
        for name, result in results.items()
    }


def _summary(
    result: Mapping[str, Any], results: Mapping[str, Any], eager_error: float
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "error" in result:
        found["error_over_eager"] = result["error"] / eager_error if eager_error else None
    samples = [sample for samples in result["rounds_s"] for sample in samples]
    if len(samples) < 2:
        return found
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    found |= {"median_s": middle, "quartiles_s": [low, high]}
    found |= {"min_s": min(samples), "max_s": max(samples), "speedup": {}}
    for baseline in BASELINES:
        ratios = _ratios(results.get(baseline, {"rounds_s": []})["rounds_s"], result["rounds_s"])
        if ratios:
            found["speedup"][baseline] = {
                "median": statistics.median(ratios),
                "min": min(ratios),
                "max": max(ratios),
            }
    return found


def _ratios(baseline: Sequence[Sequence[float]], rounds: Sequence[Sequence[float]]) -> list[float]:
    pairs = zip(baseline, rounds, strict=False)
    return [statistics.median(theirs) / statistics.median(ours) for theirs, ours in pairs]


def table(model: str, found: Mapping[str, Any]) -> RenderableType:
    """One model's backends, and where the compile time of each went."""
    if "reason" in found:
        return Text(f"{model}: no reference: {found['reason']}", style="red")
    shapes = ", ".join(found["inputs"].values())
    title = Text.assemble((model, "bold"), f"  {shapes}; {found['threads']} threads")
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    grid.add_column("backend", no_wrap=True)
    baselines = [baseline for baseline in BASELINES if baseline in found["backends"]]
    against = (f"speed /\n{baseline}" for baseline in baselines)
    rest = ("compile\ns, cold", "error /\neager's", "in\neager")
    for heading in ("median\nms", "quartiles\nms", *against, *rest):
        grid.add_column(heading, justify="right", no_wrap=True)
    notes = []
    for name, result in found["backends"].items():
        grid.add_row(name, *_cells(name, result, baselines))
        notes += _notes(name, result)
    return Group(title, grid, *notes, "")


def _cells(name: str, result: Mapping[str, Any], baselines: Sequence[str]) -> list[RenderableType]:
    summary = result["summary"]
    failed = result["status"] != "ok"
    cells: list[RenderableType] = [Text("failed", style="red") if failed else "-", "-"]
    if "median_s" in summary and not failed:
        low, high = summary["quartiles_s"]
        cells = [Text(_ms(summary["median_s"]), style="bold"), f"{_ms(low)}-{_ms(high)}"]
    for baseline in baselines:
        ratio = summary.get("speedup", {}).get(baseline)
        cells.append(_speedup(ratio["median"]) if ratio and baseline != name else "-")
    cells.append(f"{result['compile_s']:.1f}" if "compile_s" in result and name != "eager" else "-")
    times = summary.get("error_over_eager")
    cells.append("-" if times is None else Text(f"{times:.2g}", style="red" if times > 10 else ""))
    count = len(result.get("fallbacks", ()))
    cells.append(Text(str(count), style="yellow") if count else "-")
    return cells


def _notes(name: str, result: Mapping[str, Any]) -> list[Text]:
    if result["status"] != "ok":
        return [Text(f"  {name}: {result['reason']}", style="red")]
    stages = result["stages_s"]
    if len(stages) < 2:
        return []
    spent = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())
    return [Text(f"  {name}, seconds: {spent}", style="dim")]


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1000
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f}"


def _speedup(ratio: float) -> Text:
    return Text(f"{ratio:.2f}x", style="green" if ratio >= 1.05 else "red" if ratio < 0.95 else "")
