"""How a result lies in memory: eager's strides, from a program that writes row-major buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .graphs import hint

aten = torch.ops.aten


def is_row_major(shape: Any, strides: Any) -> bool:
    """Whether these strides are the dense row-major ones, those of dims of size 1 included."""
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected:
            return False
        expected = expected * (extent if extent != 0 else 1)
    return True


@dataclass(frozen=True)
class Layout:
    """From a tensor to what lies in memory: repeated dims once, dims by falling stride."""

    repeated: tuple[int, ...]
    order: tuple[int, ...]

    def apply(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        """Add the nodes that reorder `node` to its order in memory, at the insertion point."""
        for dim in self.repeated:
            node = _call(graph, aten.slice.Tensor, node, dim, 0, 1)
        if self.order != tuple(sorted(self.order)):
            node = _call(graph, aten.permute.default, node, list(self.order))
        return node


def _call(graph: fx.Graph, op: Any, node: fx.Node, *args: Any) -> fx.Node:
    call = graph.call_function(op, (node, *args))
    call.meta = {key: node.meta[key] for key in ("stack_trace",) if key in node.meta}
    call.meta["val"] = op(node.meta["val"], *args)
    return call


def physical(tensor: torch.Tensor) -> Layout | None:
    """The layout of a fake tensor by its strides; None where it is plain row-major."""
    return physical_of([hint(s) for s in tensor.shape], [hint(s) for s in tensor.stride()])


def physical_of(shape: Sequence[int], strides: Sequence[int]) -> Layout | None:
    """As `physical`, of a shape and strides."""
    if is_row_major(shape, strides) or 0 in shape:
        return None
    dims = range(len(shape))
    repeated = tuple(d for d in dims if strides[d] == 0 and shape[d] > 1)
    order = tuple(sorted(dims, key=lambda d: -strides[d] if shape[d] > 1 else 0))
    if any(shape[d] == 1 for d in dims):
        order = _with_ones_in_place(order, shape)
    return Layout(repeated, order)


def _with_ones_in_place(order: tuple[int, ...], shape: Sequence[int]) -> tuple[int, ...]:
    """Dims of size 1 lie anywhere; leave them at their own position to permute less."""
    others = iter(d for d in order if shape[d] != 1)
    return tuple(d if shape[d] == 1 else next(others) for d in range(len(shape)))


def restride(result: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """The tensor of this shape and these strides whose memory, `physical` order, is `result`."""
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if 0 in shape or reach <= result.numel():
        return result.as_strided(shape, strides)
    # Eager leaves gaps between elements (a slice of something larger that only it returns).
    plan = physical_of(shape, strides)
    assert plan is not None, "row-major strides leave no gaps"
    spaced = torch.empty_strided(shape, strides, dtype=result.dtype)
    target = spaced
    for dim in plan.repeated:
        target = target.narrow(dim, 0, 1)
    target.permute(plan.order).copy_(result)
    return spaced


def kind(tensor: torch.Tensor, exact: bool) -> Any:
    """What of a tensor's layout can show in the layouts of results; None where it is contiguous.

    `exact`: a result is a view of the tensor, so its very strides show.
    """
    if tensor.is_contiguous():
        return None
    if exact:
        return tensor.stride()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: -strides[d]))
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    return order, reach == tensor.numel(), tuple(s == 0 for s in strides)
