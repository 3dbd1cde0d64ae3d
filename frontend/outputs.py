"""What a graph returns: which results it has to compute, and how eager's objects come of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..errors import CaptureError
from . import layout
from .graphs import example_value
from .signature import Output, Size
from .specs import dtype_name, size, tensor_spec


def _storage(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError as error:
        raise CaptureError(f"a transformed tensor (torch.func) is captured: {error}") from error


class Outputs:
    """Sorts what a graph returns: results to compute; views, scalars and constants to make."""

    def __init__(self, arguments: list[fx.Node], graph: fx.Graph):
        (self._returned,) = graph.output_node().args
        self._results: list[fx.Node] = []
        self._layouts: list[layout.Layout | None] = []
        inputs = {_storage(example_value(a)): i for i, a in reversed(list(enumerate(arguments)))}
        inputs.pop(None, None)
        owners: dict[Any, fx.Node] = {}
        for node in graph.nodes:
            owners.setdefault(_storage(example_value(node)), node)
        counts: dict[Any, set[fx.Node]] = {}
        for leaf in self._returned:
            if isinstance(leaf, fx.Node):
                counts.setdefault(_storage(example_value(leaf)), set()).add(leaf)
        self._arguments = arguments
        self._outputs = [self._output(leaf, inputs, owners, counts) for leaf in self._returned]

    def _output(
        self,
        leaf: Any,
        inputs: dict[Any, int],
        owners: dict[Any, fx.Node],
        counts: dict[Any, set[fx.Node]],
    ) -> Output:
        value = example_value(leaf) if isinstance(leaf, fx.Node) else leaf
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return Output("scalar", value=size(value))
        if not isinstance(value, torch.Tensor):
            return Output("constant", value=value)
        spec, storage = tensor_spec(value), _storage(value)
        if storage in inputs:
            index = inputs[storage]
            # Two arguments may share storage: prefer the very object that is returned.
            for i, argument in enumerate(self._arguments):
                if argument is leaf or example_value(argument) is value:
                    return Output("same", i, tensor=spec)
            base = example_value(self._arguments[index])
            detached = base.requires_grad and not value.requires_grad
            offset = _offset(value, base)
            return Output("alias", index, "input", spec, offset, detached=detached)
        if len(counts[storage]) > 1:
            owner = owners[storage]
            base = example_value(owner)
            index = self._result(owner)
            if owner is not leaf:
                return Output("alias", index, "result", spec, _offset(value, base))
            return Output("result", index, tensor=spec)
        # Where eager makes the sizes, it has made the strides too.
        known = not free_unbacked_symbols(value)
        return Output("result", self._result(leaf), tensor=spec if known else None)

    def _result(self, node: fx.Node) -> int:
        if node not in self._results:
            self._results.append(node)
            value = example_value(node)
            known = not free_unbacked_symbols(value)
            self._layouts.append(layout.physical(value) if known else None)
        return self._results.index(node)

    def rewrite(self, module: fx.GraphModule) -> None:
        """Let the graph return what is to be computed, and nothing else."""
        module.graph.output_node().args = (tuple(self._results),)
        module.recompile()

    def normalise_layouts(self, graph: fx.Graph, first: int, fake_mode: FakeTensorMode) -> None:
        """Let the graph return each result, from position `first` on, as it lies in memory."""
        output = graph.output_node()
        results = list(output.args[0])
        with graph.inserting_before(output), fake_mode:
            for i, plan in enumerate(self._layouts, first):
                if plan is not None:
                    results[i] = plan.apply(graph, results[i])
        output.args = (tuple(results),)

    def signature(self, first: int) -> tuple[Output, ...]:
        """The outputs, with results counted from `first`."""
        return tuple(
            replace(o, index=o.index + first)
            if o.kind == "result" or (o.kind == "alias" and o.of == "result")
            else o
            for o in self._outputs
        )


def _offset(value: torch.Tensor, base: torch.Tensor) -> Size:
    if value.dtype != base.dtype:
        raise CaptureError(
            f"a {dtype_name(value.dtype)} view of a {dtype_name(base.dtype)} tensor is returned"
        )
    return size(value.storage_offset() - base.storage_offset())
