"""Spells reshapes over varying sizes as splits and merges of dims.

Torch-mlir and IREE guess how the dims of a view with several varying sizes correspond, and guess
wrong for [s, b, 16] as [s, 4 b, 4]. Split into [s, b, 4, 4] and merged, nothing is left to guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .graphs import calls

aten = torch.ops.aten

_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}


def spell_reshapes(graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
    """Replace reshapes of or to two or more varying sizes, where their dims correspond."""
    for node in calls(graph):
        if node.target not in _RESHAPES:
            continue
        source, value = node.args[0], node.meta["val"]
        before, after = _exprs(source.meta["val"].shape), _exprs(value.shape)
        if max(_varying(before), _varying(after)) < 2 or before == after:
            continue
        factors = _common_factors(before, after)
        sizes = {e: a for e, a in zip(after, node.args[1], strict=True) if isinstance(a, fx.Node)}
        if factors is None:
            continue
        with graph.inserting_before(node), fake_mode:
            new = _rewritten(graph, source, *factors, sizes)
        if new is not None:
            node.replace_all_uses_with(new)


def _exprs(shape: Sequence[Any]) -> list[Any]:
    return [sympy.sympify(s.node.expr if isinstance(s, torch.SymInt) else s) for s in shape]


def _varying(shape: Sequence[Any]) -> int:
    return sum(not size.is_number for size in shape)


def _common_factors(
    before: Sequence[Any], after: Sequence[Any]
) -> tuple[list[list[Any]], list[int]] | None:
    """Each dim of `before` as factors, and how many of these, in turn, each dim of `after` takes.

    None where the shapes have no common refinement.
    """
    splits: list[list[Any]] = [[] for _ in before]
    merges = [0 for _ in after]
    i = j = 0
    left, right = [*before, sympy.Integer(1)], [*after, sympy.Integer(1)]
    while i < len(before) or j < len(after):
        factor = sympy.gcd(left[i], right[j])
        if factor == 1 and 1 not in (left[i], right[j]):
            return None
        if factor != 1:
            splits[i].append(factor)
            merges[j] += 1
        left[i], right[j] = sympy.cancel(left[i] / factor), sympy.cancel(right[j] / factor)
        moved = False
        if i < len(before) and left[i] == 1:
            i, moved = i + 1, True
        if j < len(after) and right[j] == 1:
            j, moved = j + 1, True
        if not moved:
            return None
    return splits, merges


def _rewritten(
    graph: fx.Graph,
    node: fx.Node,
    splits: Sequence[Sequence[Any]],
    merges: Sequence[int],
    sizes: dict[Any, fx.Node],
) -> fx.Node | None:
    for dim in reversed(range(len(splits))):
        factors = splits[dim]
        if not factors:
            node = _call(graph, aten.squeeze.dim, node, dim)
        elif len(factors) > 1:
            # At most one factor may be left for the op to find.
            lengths = [int(f) if f.is_number else sizes.get(f, -1) for f in factors]
            if lengths.count(-1) > 1:
                return None
            node = _call(graph, aten.unflatten.int, node, dim, lengths)
    for dim, count in enumerate(merges):
        if count == 0:
            node = _call(graph, aten.unsqueeze.default, node, dim)
        elif count > 1:
            node = _call(graph, aten.flatten.using_ints, node, dim, dim + count - 1)
    return node


def _call(graph: fx.Graph, op: Any, *args: Any) -> fx.Node:
    node = graph.call_function(op, args)
    node.meta = {k: v for k, v in args[0].meta.items() if k == "stack_trace"}
    resolve = fx.node.map_arg(args, lambda n: n.meta["val"])
    node.meta["val"] = op(*resolve)
    return node
