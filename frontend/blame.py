"""Finds the operators that a failed compilation is due to."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from torch import fx

from ..errors import FlambeauError
from .graphs import calls, source_line
from .importer import import_graph
from .partition import Part, partition

WHOLE = "the graph as a whole"
"""Begins the reason of nodes that fail only together."""

Check = Callable[[bytes], object]


def blame(part: Part, graph: fx.Graph, error: FlambeauError, check: Check) -> dict[fx.Node, str]:
    """The nodes of `graph` that made `part` fail, with the reason of each.

    Those that the diagnostics name, or whose line they name; else those that can't be imported,
    or for which `check` raises, when alone; else all of the part.
    """
    nodes = {node.name: node for node in calls(graph) if node in part.members}
    text = getattr(error, "diagnostics", "") or str(error)
    named = [name for name in re.findall(r'"(\w+)"\(', text) if name in nodes]
    if named:
        return {nodes[named[0]]: summary(text)}
    # IREE keeps lines but loses names.
    for line in dict.fromkeys(re.findall(r"^(\S+:\d+):\d+: error", text, re.MULTILINE)):
        there = [node for node in nodes.values() if source_line(node) == line]
        if there:
            return dict.fromkeys(there, summary(text))
    for attempt in (lambda _bytecode: None, check):
        reasons = {node: _fails_alone(node, attempt) for node in nodes.values()}
        found = {node: reason for node, reason in reasons.items() if reason}
        if found:
            return found
    whole = f"{WHOLE}: {summary(str(error))}"
    return dict.fromkeys(nodes.values(), whole)


def _fails_alone(node: fx.Node, check: Check) -> str | None:
    own = {node, *(user for user in node.users if user.target is operator.getitem)}
    others = {n for n in node.graph.nodes if n not in own}
    part = next((part for part in partition(node.graph, others) if part.compiled), None)
    if part is None:
        return None
    try:
        check(import_graph(part.module.graph, {}))
    except FlambeauError as error:
        return summary(str(error))
    return None


def summary(text: str) -> str:
    """The first line of diagnostics that says what went wrong, without its location."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search("error|failed|crash|ran out", line)]
    line = (telling or lines or ["no diagnostics"])[0]
    return re.sub(r"^\S+:\d+:\d+: ", "", line)[:300]
