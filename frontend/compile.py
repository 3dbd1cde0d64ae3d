"""A captured graph to an Executor: decides what runs in eager, has the rest compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from ..config import config
from ..errors import CaptureError, FallbackWarning, PassFailed, TargetError, UnsupportedOp
from .binding import Session, Weight, Weights
from .blame import WHOLE, blame
from .capability import BY_DESIGN, EXPANDABLE, eager_nodes
from .capture import Captured
from .decompositions import Decompositions, torch_decomposition
from .executor import CompiledPart, Executor
from .graphs import calls, hint, placeholders, source_line, tensors
from .importer import import_graph
from .partition import Part, partition, positions
from .signature import Input

Stages = dict[str, bytes]


class Program(Protocol):
    """What was compiled: how to bind its weights, and which arguments it changes in place."""

    written: tuple[int, ...]

    def bind(self, weights: dict[str, Any], threads: int) -> Session: ...


class Build(Protocol):
    """Compiles bytecode of the torch dialect, and keeps its stages."""

    def __call__(self, bytecode: bytes, stages: Stages) -> Program: ...


@dataclass(frozen=True)
class Fallback:
    """An operator that runs in eager: its name, the user's source line and the reason."""

    op: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op} at {self.source}: {self.reason}"


@dataclass(frozen=True)
class Compiled:
    """A captured graph's executor, what fell back, and the IR of each compiled part by stage."""

    captured: Captured
    executor: Executor
    fallbacks: tuple[Fallback, ...]
    stages: list[Stages]


def compile_graph(
    trace: Callable[[Decompositions], Captured],
    build: Build,
    strict: bool = False,
    recover: bool = True,
) -> Compiled:
    """Compile what can be, run the rest in eager, and warn once of what that is.

    An operator that can't be compiled is traced again as what PyTorch decomposes it into, where
    there is such a thing; else it joins the eager ones. Unless `recover`, a failure in compiling
    is raised. Raises UnsupportedOp instead of falling back under `strict`, naming all operators.
    """
    expanded: dict[Any, Any] = {}
    failures: dict[Any, str] = {}
    added: set[Any] = set()
    whole: set[Any] = set()
    while True:
        try:
            captured = trace(expanded)
        except CaptureError:
            if not added:
                raise
            # What PyTorch decomposes one of these into can't be traced: leave them whole.
            whole |= added
            expanded = {op: f for op, f in expanded.items() if op not in added}
            added = set()
            continue
        graph = captured.module.graph
        eager = eager_nodes(graph)
        eager |= {
            n: failures[k] for n in calls(graph) if (k := _key(n)) in failures and n not in eager
        }
        more = _expansions([n for n, why in eager.items() if why in EXPANDABLE], expanded, whole)
        if not more:
            attempt = _Attempt(captured, eager, build, recover)
            if not attempt.failed:
                break
            alone = [n for n, why in attempt.failed.items() if not why.startswith(WHOLE)]
            more = _expansions(alone, expanded, whole)
            failures |= {_key(node): why for node, why in attempt.failed.items()}
        added = set(more)
        expanded |= more
    fallbacks = _fallbacks(eager)
    if fallbacks:
        _report(fallbacks, strict)
    executor = Executor(captured, attempt.parts, attempt.functions)
    return Compiled(captured, executor, fallbacks, attempt.stages)


class _Attempt:
    """The parts of a graph compiled, or `failed`: the nodes that stood in the way."""

    def __init__(
        self, captured: Captured, eager: Mapping[fx.Node, str], build: Build, recover: bool
    ):
        graph = captured.module.graph
        self.parts = partition(graph, eager)
        self.stages: list[Stages] = []
        self.functions: list[Callable[..., Sequence[Any]]] = []
        self.failed: dict[fx.Node, str] = {}
        for part in self.parts:
            if not part.compiled:
                self.functions.append(part.module)
                continue
            self.stages.append({})
            try:
                compiled = self._compile(part, captured, build, self.stages[-1])
                self.functions.append(compiled)
            except (UnsupportedOp, PassFailed, TargetError) as error:
                if not recover:
                    raise
                self.failed |= blame(part, graph, error, lambda bytecode: build(bytecode, {}))

    def _compile(
        self, part: Part, captured: Captured, build: Build, stages: Stages
    ) -> CompiledPart:
        where = positions(self.parts, part)
        keys = {i: f"w{i}" for i in _weights(part, captured)}
        program = build(import_graph(part.module.graph, keys), stages)
        arguments = [where[i] for i in range(len(part.inputs)) if i not in keys]
        updates = {result: where[i] for result, i in _updates(part, captured).items()}
        weights = [_weight(part.inputs[i], where[i], key) for i, key in keys.items()]
        return CompiledPart(
            Weights(program.bind, weights),
            tuple(arguments),
            copied=frozenset(arguments[i] for i in program.written) - frozenset(updates.values()),
            updates=updates,
            unsigned=frozenset(
                i for i, n in enumerate(part.outputs) if n.meta["val"].dtype is torch.uint8
            ),
            threaded=_work(part.module.graph) >= config.tiny_program_flops,
        )


def _key(node: fx.Node) -> tuple[Any, ...]:
    """Equal for nodes that would fail alike: the op with the types of all it reads and makes."""
    types = tensors((node, *node.all_input_nodes))
    return node.target, *((t.dtype, *map(str, t.shape)) for t in types)


def _expansions(
    nodes: Iterable[fx.Node], expanded: Mapping[Any, Any], whole: set[Any]
) -> dict[Any, Any]:
    ops = {node.target for node in nodes} - expanded.keys() - whole
    return {op: function for op in ops if (function := torch_decomposition(op)) is not None}


def _weights(part: Part, captured: Captured) -> list[int]:
    """Inputs of the part that are state of the module which the graph does not change."""
    given = dict(zip(placeholders(captured.module.graph), captured.signature.inputs, strict=True))
    inputs = enumerate(part.inputs)
    return [i for i, node in inputs if node in given and _is_weight(given[node])]


def _weight(node: fx.Node, position: int, key: str) -> Weight:
    value = node.meta["val"]
    return Weight(position, key, value.dtype, tuple(map(int, value.shape)))


def _is_weight(given: Input) -> bool:
    if given.tensor is None or given.kind == "user" or given.mutated:
        return False
    return all(isinstance(extent, int) for extent in given.tensor.shape)


def _updates(part: Part, captured: Captured) -> dict[int, int]:
    """Results of the part that are the new values of arguments which only this part reads."""
    graph = captured.module.graph
    arguments, results = placeholders(graph), graph.output_node().args[0]
    found = {}
    for target, result in captured.signature.mutations:
        argument, value = arguments[target], results[result]
        read_here = argument in part.inputs and part.members.issuperset(argument.users)
        if value in part.outputs and read_here:
            found[part.outputs.index(value)] = part.inputs.index(argument)
    return found


_CONTRACTIONS = ("mm", "matmul", "linear", "conv", "attention")


def _work(graph: fx.Graph) -> int:
    """A rough count of operations: elements made, times the elements that each one sums over."""
    total = 0
    for node in calls(graph):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        sources = [n.meta.get("val") for n in node.all_input_nodes]
        largest = max((hint(s.numel()) for s in sources if isinstance(s, torch.Tensor)), default=1)
        if any(word in str(node.target) for word in _CONTRACTIONS):
            total += largest * max(
                1, hint(value.numel()) // max(1, hint(value.shape[-1]) if value.dim() else 1)
            )
        else:
            total += max(largest, hint(value.numel()))
    return total


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
