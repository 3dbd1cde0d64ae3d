"""Checks indices inside the program, where eager checks them: a bad one raises, and reads nothing.

Each checked index is replaced by one that is in range, and its badness goes into a code that the
graph returns: 0, or the number of a check that failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .graphs import calls, source_line

aten = torch.ops.aten


_INDEXED_ALONG_DIM = {
    aten.gather.default,
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_select.default,
    aten.scatter.reduce,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
}
"""These take a dim and an index along it, after the tensor that they index."""

_INDEXED_BY_LIST = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten._unsafe_index_put.default,
}
"""These take an index, or None, for each leading dim, and count negative ones from the end."""


def add_checks(graph: fx.Graph, fake_mode: FakeTensorMode) -> tuple[str, ...]:
    """Add a last result, the code of a failed check; returns what each check is of, from 1 on."""
    checked: list[str] = []
    code: fx.Node | None = None
    with fake_mode:
        for node in calls(graph):
            for place, extent, wraps in _indices(graph, node):
                with graph.inserting_before(node):
                    bad, safe = _guarded(graph, place.get(node), extent, wraps)
                    checked.append(f"{node.target} at {source_line(node)}")
                    number = _call(graph, aten._to_copy.default, bad, dtype=torch.int64)
                    number = _call(graph, aten.mul.Scalar, number, len(checked))
                    if code is not None:
                        number = _call(graph, aten.maximum.default, code, number)
                    code = number
                place.put(node, safe)
    if code is not None:
        output = graph.output_node()
        output.args = ((*output.args[0], code),)
    return tuple(checked)


@dataclass(frozen=True)
class _Place:
    """An argument, or an element of a list argument, of a node."""

    position: int
    element: int | None = None

    def get(self, node: fx.Node) -> fx.Node:
        argument = node.args[self.position]
        return argument if self.element is None else argument[self.element]

    def put(self, node: fx.Node, value: fx.Node) -> None:
        if self.element is not None:
            elements = list(node.args[self.position])
            elements[self.element] = value
            node.update_arg(self.position, elements)
        else:
            node.update_arg(self.position, value)


def _indices(graph: fx.Graph, node: fx.Node) -> Iterator[tuple[_Place, Any, bool]]:
    if node.target in _INDEXED_BY_LIST:
        for i, index in enumerate(node.args[1]):
            if index is not None and _is_integer(index):
                yield _Place(1, i), _extent(graph, node, i), True
    elif node.target is aten.embedding.default:
        yield _Place(1), _extent(graph, node, 0), False
    elif node.target in _INDEXED_ALONG_DIM and node.args[0].meta["val"].dim():
        yield _Place(2), _extent(graph, node, node.args[1]), False


def _is_integer(index: fx.Node) -> bool:
    return index.meta["val"].dtype in (torch.int64, torch.int32)


def _extent(graph: fx.Graph, node: fx.Node, dim: int) -> Any:
    source = node.args[0]
    extent = source.meta["val"].shape[dim]
    if isinstance(extent, int):
        return extent
    with graph.inserting_before(node):
        return _call(graph, aten.sym_size.int, source, dim % source.meta["val"].dim())


def _guarded(graph: fx.Graph, index: fx.Node, extent: Any, wraps: bool) -> tuple[fx.Node, fx.Node]:
    """Whether any index is out of range, and the index with those replaced by 0."""
    if wraps:
        negative = _call(graph, aten.lt.Scalar, index, 0)
        from_end = _call(graph, aten.add.Scalar, index, extent)
        index = _call(graph, aten.where.self, negative, from_end, index)
    low, high = index, index
    if dims := list(range(index.meta["val"].dim())):
        # Extremes rather than `any` over flags: IREE can't fuse the latter with dynamic sizes.
        low = _call(graph, aten.amin.default, index, dims)
        high = _call(graph, aten.amax.default, index, dims)
    bad = _outside(graph, low, high, extent)
    each = _outside(graph, index, index, extent)
    return bad, _call(graph, aten.masked_fill.Scalar, index, each, 0)


def _outside(graph: fx.Graph, low: fx.Node, high: fx.Node, extent: Any) -> fx.Node:
    below = _call(graph, aten.lt.Scalar, low, 0)
    above = _call(graph, aten.ge.Scalar, high, extent)
    return _call(graph, aten.logical_or.default, below, above)


def _call(graph: fx.Graph, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(op, args, kwargs)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    node.meta["val"] = op(*values, **kwargs)
    source = next(a for a in args if isinstance(a, fx.Node))
    if "stack_trace" in source.meta:
        node.meta["stack_trace"] = source.meta["stack_trace"]
    return node
