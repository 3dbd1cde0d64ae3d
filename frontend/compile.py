"""A captured graph to an Executor: decides what runs in eager, has the rest compiled."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from ..config import config
from ..errors import FallbackWarning, FlambeauError, PassFailed, TargetError, UnsupportedOp
from .binding import Bind, Weights
from .capability import BY_DESIGN, eager_nodes
from .capture import Captured
from .executor import CompiledPart, Executor
from .graphs import calls, hint, placeholders, source_line
from .importer import import_graph
from .partition import Part, partition
from .signature import Input


class Build(Protocol):
    """Compiles bytecode of the torch dialect; returns how to bind its weights."""

    def __call__(self, bytecode: bytes, stages: dict[str, bytes]) -> Bind: ...


@dataclass(frozen=True)
class Fallback:
    """An operator that runs in eager: its name, the user's source line and the reason."""

    op: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op} at {self.source}: {self.reason}"


@dataclass
class Compiled:
    """An executor, what fell back, and the IR of each compiled part by stage."""

    executor: Executor
    fallbacks: tuple[Fallback, ...]
    stages: list[dict[str, bytes]] = field(default_factory=list)


def compile_captured(
    captured: Captured, build: Build, strict: bool = False, recover: bool = True
) -> Compiled:
    """Compile what can be, run the rest in eager, and warn once of what that is.

    An operator whose lowering fails joins the eager ones, and the graph is tried again, if
    `recover`; else the failure is raised. Raises UnsupportedOp instead of falling back under
    `strict`, naming all such operators.
    """
    graph = captured.module.graph
    eager = eager_nodes(graph)
    while True:
        parts = partition(graph, eager)
        stages: list[dict[str, bytes]] = []
        functions: list[Callable[..., Sequence[Any]]] = []
        failed: dict[fx.Node, str] = {}
        for part in parts:
            if not part.compiled:
                functions.append(part.module)
                continue
            stages.append({})
            try:
                functions.append(_compile_part(part, captured, build, stages[-1]))
            except (UnsupportedOp, PassFailed, TargetError) as error:
                if not recover:
                    raise
                failed |= _blame(part, graph, error, build)
        if not failed:
            break
        eager |= failed
    fallbacks = _fallbacks(eager)
    if fallbacks:
        _report(fallbacks, strict)
    return Compiled(Executor(captured, parts, functions), fallbacks, stages)


def _compile_part(
    part: Part, captured: Captured, build: Build, stages: dict[str, bytes]
) -> CompiledPart:
    weights = _weights(part, captured)
    keys = [f"w{i}" for i in weights]
    bytecode = import_graph(part.module.graph, dict(zip(weights, keys, strict=True)))
    bind = build(bytecode, stages)
    rest = tuple(i for i in range(len(part.inputs)) if i not in weights)
    threaded = _flops(part.module.graph) >= config.tiny_program_flops
    values = [part.inputs[i].meta["val"] for i in weights]
    specs = [(value.dtype, *map(int, value.shape)) for value in values]
    return CompiledPart(Weights(bind, keys, specs), weights, rest, len(part.outputs), threaded)


def _weights(part: Part, captured: Captured) -> tuple[int, ...]:
    """Inputs of the part that are state of the module which the graph does not change."""
    inputs = dict(
        zip(placeholders(captured.module.graph), captured.signature.inputs, strict=True)
    )
    return tuple(
        i
        for i, node in enumerate(part.inputs)
        if node in inputs and _is_weight(inputs[node])
    )


def _is_weight(given: Input) -> bool:
    static = given.tensor and all(isinstance(extent, int) for extent in given.tensor.shape)
    return bool(static) and given.kind != "user" and not given.mutated


def _flops(graph: fx.Graph) -> int:
    """A rough count of operations: elements touched, times the depth of contractions."""
    total = 0
    for node in calls(graph):
        for value in (node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)):
            if isinstance(value, torch.Tensor):
                total += hint(value.numel()) * (_depth(node) if value is node.meta["val"] else 1)
    return total


_CONTRACTIONS = ("matmul", "mm", "bmm", "linear", "addmm", "conv", "attention", "baddbmm")


def _depth(node: fx.Node) -> int:
    if not any(word in str(node.target) for word in _CONTRACTIONS):
        return 1
    operands = [n.meta.get("val") for n in node.all_input_nodes]
    weights = [v for v in operands[:2] if isinstance(v, torch.Tensor) and v.dim()]
    return 2 * max((hint(v.numel() // max(1, hint(v.shape[0]))) for v in weights[1:]), default=1)


def _blame(
    part: Part, graph: fx.Graph, error: FlambeauError, build: Build
) -> dict[fx.Node, str]:
    """The nodes that a failure is due to: those its diagnostics name, else those that fail alone."""
    nodes = {node.name: node for node in calls(graph)}
    text = getattr(error, "diagnostics", "") or str(error)
    members = {node.name for node in calls(part.module.graph)}
    named = [name for name in re.findall(r'"(\w+)"\(', text) if name in members]
    if named:
        return {nodes[named[0]]: _summary(text)}
    for check in (None, build):
        alone = {nodes[n]: _fails_alone(nodes[n], check) for n in sorted(members & nodes.keys())}
        found = {node: reason for node, reason in alone.items() if reason}
        if found:
            return found
    whole = f"the graph as a whole: {_summary(str(error))}"
    return {nodes[name]: whole for name in members & nodes.keys()}


def _alone(node: fx.Node) -> Part | None:
    """The node as a part of its own, with the elements it returns."""
    own = {node, *(user for user in node.users if user.target is operator.getitem)}
    others = {n for n in node.graph.nodes if n not in own}
    return next((part for part in partition(node.graph, others) if part.compiled), None)


def _fails_alone(node: fx.Node, build: Build | None) -> str | None:
    """Why the node can't be imported or, given `build`, compiled by itself."""
    part = _alone(node)
    if part is None:
        return None
    try:
        bytecode = import_graph(part.module.graph, {})
        if build is not None:
            build(bytecode, {})
    except FlambeauError as error:
        return _summary(str(error))
    return None


def _summary(text: str) -> str:
    """The first line that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line or "failed" in line or "crash" in line]
    return (telling or lines or ["no diagnostics"])[0][:300]


def _fallbacks(eager: dict[fx.Node, str]) -> tuple[Fallback, ...]:
    found = (
        Fallback(str(node.target), source_line(node), reason)
        for node, reason in eager.items()
        if reason != BY_DESIGN
    )
    return tuple(dict.fromkeys(found))


def _report(fallbacks: Sequence[Fallback], strict: bool) -> None:
    listing = "\n".join(f"  {fallback}" for fallback in fallbacks)
    if strict:
        raise UnsupportedOp(f"these operators would run in eager PyTorch:\n{listing}")
    warnings.warn(
        f"flambeau runs these operators in eager PyTorch, between compiled parts:\n{listing}",
        FallbackWarning,
        stacklevel=2,
    )
