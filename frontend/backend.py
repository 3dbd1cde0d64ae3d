"""The torch.compile backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..errors import CaptureError, FallbackWarning, UnsupportedOp
from .autograd import Call, Differentiable, requires_grad
from .capture import Captured, capture
from .compile import Build, compile_graph
from .graphs import calls, placeholders


def compile_dynamo(
    graph: fx.GraphModule, examples: Sequence[Any], build: Build, strict: bool = False
) -> Callable[..., Any]:
    """A callable for a graph of Dynamo's, with its arguments and outputs.

    Dynamo's guards answer for shapes, dtypes, strides, devices and grad mode at each call.
    """
    kinds = _kinds(graph, examples)
    try:
        compiled = compile_graph(lambda more: capture(graph, more, kinds=kinds), build, strict)
    except CaptureError as error:
        return _in_eager(graph, str(error), strict)
    captured = compiled.captured
    if not calls(captured.module.graph):
        return graph
    call: Call = compiled.executor
    if torch.is_grad_enabled() and any(map(requires_grad, examples)):
        call = Differentiable(call, captured, strict)
    call = _bound(call, captured, examples)
    plain = compiled.executor.plain
    return plain if call is compiled.executor and plain else lambda *arguments: call(arguments)


def _kinds(graph: fx.GraphModule, examples: Sequence[Any]) -> dict[int, str]:
    """Which arguments are state: parameters, and what Dynamo marks as static (buffers)."""
    kinds = {}
    for i, (node, example) in enumerate(zip(placeholders(graph.graph), examples, strict=True)):
        if isinstance(example, torch.nn.Parameter):
            kinds[i] = "parameter"
        elif "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {}):
            kinds[i] = "buffer"
    return kinds


def _bound(call: Call, captured: Captured, examples: Sequence[Any]) -> Call:
    """`call` over the arguments of Dynamo's graph: adds constants, reads wrapped floats."""
    inputs = captured.signature.inputs
    constants = [captured.state[i] for i in sorted(captured.state)]
    floats = [
        i for i, e in enumerate(examples) if isinstance(e, torch.Tensor) and not inputs[i].tensor
    ]
    if not (constants or floats):
        return call

    def complete(arguments: Sequence[Any]) -> Sequence[Any]:
        values = [*arguments, *constants]
        for i in floats:
            values[i] = values[i].item()
        return call(values)

    return complete


def _in_eager(graph: fx.GraphModule, reason: str, strict: bool) -> fx.GraphModule:
    message = f"this graph runs in eager PyTorch as a whole: {reason}"
    if strict:
        raise UnsupportedOp(message)
    warnings.warn(f"flambeau: {message}", FallbackWarning, stacklevel=2)
    return graph
