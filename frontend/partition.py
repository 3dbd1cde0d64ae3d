"""Splits a functional graph into parts that are compiled and parts that run in eager."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .graphs import is_random, is_scalar, placeholders

_SIZE_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.floordiv}


@dataclass(frozen=True)
class Part:
    """A subgraph: `module` takes the values of `inputs` and returns those of `outputs`.

    Both are nodes of the whole graph. An input that is no tensor is a scalar known from symbols.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    members: frozenset[fx.Node]
    compiled: bool


def is_direct(parts: Sequence[Part]) -> bool:
    """Whether the one part of a graph can be called with the graph's own arguments."""
    return len(parts) == 1 and all(node.op == "placeholder" for node in parts[0].inputs)


def positions(parts: Sequence[Part], part: Part) -> list[int]:
    """Where `part` finds its inputs among what it is called with."""
    if not is_direct(parts) or not part.inputs:
        return list(range(len(part.inputs)))
    arguments = placeholders(part.inputs[0].graph)
    return [arguments.index(node) for node in part.inputs]


def partition(graph: fx.Graph, eager: Container[fx.Node]) -> list[Part]:
    """The parts in an order in which they can run.

    Each node goes to the earliest stage that its operands allow; compiled stages are odd, eager
    ones even. Random ops keep their order, so that the generator's stream is eager's.
    """
    stages = _stages(graph, eager)
    used_by_output = set(graph.output_node().all_input_nodes)
    parts = []
    for stage in sorted(set(stages.values())):
        members = [node for node in graph.nodes if stages.get(node) == stage]
        inside = set(members)
        outputs = tuple(
            node
            for node in members
            if not isinstance(node.meta.get("val"), (list, tuple))
            and (node in used_by_output or any(_leaves(node, inside, stages)))
        )
        if outputs or any(node.is_impure() for node in members):
            parts.append(_extract(members, outputs, compiled=stage % 2 == 1))
    return parts


def _leaves(node: fx.Node, inside: set[fx.Node], stages: dict[fx.Node, int]) -> Iterator[bool]:
    for user in node.users:
        if user.op == "call_function" and user not in inside:
            # Sizes of a tensor are known from symbols; only their users matter.
            yield user in stages
    return


def _stages(graph: fx.Graph, eager: Container[fx.Node]) -> dict[fx.Node, int]:
    stages: dict[fx.Node, int] = {}
    last_random = 0
    for node in graph.nodes:
        if node.op != "call_function" or (is_scalar(node) and node not in eager):
            continue
        if node.target is operator.getitem and node.args[0] in stages:
            stages[node] = stages[node.args[0]]
            continue
        parity = 0 if node in eager else 1
        earlier = [stages[operand] for operand in node.all_input_nodes if operand in stages]
        stage = max((s if s % 2 == parity else s + 1 for s in earlier), default=parity)
        if is_random(node):
            stage = last_random = max(stage, last_random)
        stages[node] = stage
    return stages


def _extract(members: list[fx.Node], outputs: tuple[fx.Node, ...], compiled: bool) -> Part:
    graph, copies, inputs = fx.Graph(), {}, []  # type: ignore[var-annotated]
    pending = fx.Graph()

    def argument(node: fx.Node) -> fx.Node:
        copy = pending.placeholder(node.name)
        copy.meta = dict(node.meta)
        inputs.append(node)
        return copy

    def resolve(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node.op == "get_attr":
                copies[node] = pending.node_copy(node)
            elif is_scalar(node) and _is_local_size(node, copies):
                copies[node] = pending.node_copy(node, resolve)
            else:
                copies[node] = argument(node)
        return copies[node]

    for node in members:
        copies[node] = pending.node_copy(node, resolve)
    pending.output(tuple(copies[node] for node in outputs))
    graph = _placeholders_first(pending)
    owner = members[0].graph.owning_module
    return Part(fx.GraphModule(owner, graph), tuple(inputs), outputs, frozenset(members), compiled)


def _is_local_size(node: fx.Node, copies: dict[fx.Node, fx.Node]) -> bool:
    """Whether a size can be computed in the part, where it relates the shapes of tensors."""
    if node.target is torch.ops.aten.sym_size.int:
        return node.args[0] in copies
    if node.target in _SIZE_ARITHMETIC and isinstance(node.meta.get("val"), torch.SymInt):
        operands = [a for a in node.args if isinstance(a, fx.Node)]
        return all(a in copies or _is_local_size(a, copies) for a in operands)
    return False


def _placeholders_first(pending: fx.Graph) -> fx.Graph:
    graph, copies = fx.Graph(), {}  # type: ignore[var-annotated]
    for node in pending.find_nodes(op="placeholder"):
        copies[node] = graph.node_copy(node)
    output = graph.graph_copy(pending, copies)
    graph.output(output)
    return graph
