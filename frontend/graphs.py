"""Small questions about FX graphs, asked by several files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The arguments of a graph, in order."""
    return list(graph.find_nodes(op="placeholder"))


def calls(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something, in order."""
    return [node for node in graph.nodes if node.op == "call_function"]


def example_value(node: fx.Node) -> Any:
    """What Dynamo recorded for a node of its graph."""
    return node.meta.get("example_value", node.meta.get("val"))


def values(node: fx.Node) -> list[Any]:
    """What a node produces, a list's elements one by one."""
    value = node.meta.get("val")
    return list(value) if isinstance(value, (list, tuple)) else [value]


def tensors(nodes: Iterable[fx.Node]) -> Iterator[torch.Tensor]:
    """All tensors that these nodes produce."""
    return (v for node in nodes for v in values(node) if isinstance(v, torch.Tensor))


def is_scalar(node: fx.Node) -> bool:
    """Whether the node computes a size or number rather than a tensor."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat))


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from torch's generator."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0)
    return given != 0


def hint(size: Any) -> int:
    """A size as it was in the example; 1 where that depends on data."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.hint is not None else 1
    return int(size)


def source_line(node: fx.Node) -> str:
    """The innermost line of the user's code that a node comes from."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else "an unknown line"
