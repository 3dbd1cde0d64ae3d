"""Runs a captured graph: compiled and eager parts; mutations, aliases and strides as eager's."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import increment_version

from ..errors import FallbackWarning, IndexOutOfRange
from . import layout
from .binding import Weights
from .capture import Captured
from .graphs import placeholders
from .partition import Part, is_direct
from .signature import Output, evaluate, evaluate_all

from_dlpack, to_dlpack = torch._C._from_dlpack, torch._C._to_dlpack

_ALIGNMENT_MASK = 63
"""IREE's kernels expect buffers at 64-byte boundaries."""


@dataclass
class CompiledPart:
    """A program, with the positions of its arguments among the part's inputs.

    `copied` are the arguments that the program writes to and that must not change; `updates`
    maps results to the arguments whose new value they are; `unsigned` are the results of type
    uint8, which IREE gives back as int8.
    """

    weights: Weights
    arguments: tuple[int, ...]
    copied: frozenset[int]
    updates: dict[int, int]
    unsigned: frozenset[int]
    threaded: bool

    def __call__(self, *inputs: Any) -> list[torch.Tensor]:
        # One frame and no comprehensions: under torch.compile each frame costs microseconds.
        threads = torch.get_num_threads() if self.threaded else 0
        bound = self.weights.last
        if bound is None or bound.threads != threads:
            bound = self.weights.bound(inputs, threads)
        for position, tensor, address, version in bound.seen:
            if (
                inputs[position] is not tensor
                or tensor.data_ptr() != address
                or (version is not None and tensor._version != version)
            ):
                bound = self.weights.bound(inputs, threads)
                break
        arguments, taken = [], set()
        for i in self.arguments:
            value = inputs[i]
            if isinstance(value, torch.Tensor):
                address = value.data_ptr()
                taken.add(address)
                if (
                    address & _ALIGNMENT_MASK
                    or i in self.copied
                    or not value.is_contiguous()
                    or value.is_neg()
                ):
                    value = value.detach().clone(memory_format=torch.contiguous_format)
                value = to_dlpack(value)
            arguments.append(value)
        results = bound.session(arguments)
        for i, capsule in enumerate(results):
            result = results[i] = from_dlpack(capsule)
            if i in self.unsigned:
                result = results[i] = result.view(torch.uint8)
            address = result.data_ptr()
            if address not in taken:
                taken.add(address)
            elif address and not (i in self.updates and self._is_update(i, address, inputs)):
                # IREE hands back an argument's memory, or one buffer twice: eager never does.
                results[i] = result.clone()
        return results

    def _is_update(self, result: int, pointer: int, inputs: Sequence[Any]) -> bool:
        return bool(inputs[self.updates[result]].data_ptr() == pointer)


class Executor:
    """Calls a captured graph with flat arguments, in the order of its signature's inputs."""

    def __init__(
        self,
        captured: Captured,
        parts: Sequence[Part],
        callables: Sequence[Callable[..., Sequence[Any]]],
    ):
        graph = captured.module.graph
        signature = captured.signature
        arguments = placeholders(graph)
        self.signature = signature
        self._eager = captured.run_eager
        self._mutated = [target for target, _ in signature.mutations]
        self._callables = callables
        self._slots = {node: i for i, node in enumerate(arguments)}
        self._steps = []
        for part, function in zip(parts, callables, strict=True):
            inputs: list[int | str] = [self._source(node) for node in part.inputs]
            if is_direct(parts) and part.compiled:
                inputs = list(range(len(arguments)))
            outputs = [self._slots.setdefault(node, len(self._slots)) for node in part.outputs]
            self._steps.append((function, inputs, outputs))
        self._results = [self._source(leaf) for leaf in graph.output_node().args[0]]
        self._makers = [_maker(output) for output in signature.outputs]
        self.plain = callables[0] if self._is_plain() else None

    def _source(self, node: fx.Node) -> int | str:
        """Where a value comes from at run time: a slot, or an expression over symbols."""
        if node in self._slots:
            return self._slots[node]
        value = node.meta["val"]
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return str(value.node.expr)
        return f"{value!r}"

    def _is_plain(self) -> bool:
        """One compiled part from the arguments to the outputs, and nothing around it."""
        signature = self.signature
        return (
            len(self._steps) == 1
            and not signature.symbols
            and not signature.mutations
            and not signature.checks
            and self._steps[0][1] == list(range(len(signature.inputs)))
            and self._results == self._steps[0][2]
            and [o.index for o in signature.outputs] == list(range(len(self._results)))
            and all(maker is None for maker in self._makers)
        )

    def __call__(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """The leaves of what the model returns."""
        if self.plain is not None:
            return self.plain(*arguments)
        if self._mutated and _overlap(arguments, self._mutated):
            warnings.warn(
                "flambeau: an argument that is changed in place shares storage with another one; "
                "such calls run in eager PyTorch",
                FallbackWarning,
                stacklevel=2,
            )
            return self._eager(arguments)
        symbols = self._symbols(arguments)
        values = [*arguments, *[None] * (len(self._slots) - len(arguments))]
        for function, inputs, outputs in self._steps:
            produced = function(
                *[values[i] if isinstance(i, int) else evaluate(i, symbols) for i in inputs]
            )
            for slot, value in zip(outputs, produced, strict=True):
                values[slot] = value
        results = [values[i] if isinstance(i, int) else evaluate(i, symbols) for i in self._results]
        if self.signature.checks:
            self._raise_failed_check(results[-1])
        for target, result in self.signature.mutations:
            _update(arguments[target], results[result])
        return [
            results[output.index] if maker is None else maker(arguments, results, symbols)
            for output, maker in zip(self.signature.outputs, self._makers, strict=True)
        ]

    def _raise_failed_check(self, code: torch.Tensor) -> None:
        # Read without an op: dispatching one would cost more than the check.
        number = ctypes.c_int64.from_address(code.data_ptr()).value
        if number:
            raise IndexOutOfRange(f"index out of range in {self.signature.checks[number - 1]}")

    def _symbols(self, arguments: Sequence[Any]) -> dict[str, Any]:
        symbols = {}
        for symbol in self.signature.symbols:
            value = arguments[symbol.input]
            symbols[symbol.name] = value if symbol.dim is None else value.shape[symbol.dim]
        return symbols

    def refresh(self) -> None:
        """Read all weights anew at the next call."""
        for function in self._callables:
            if isinstance(function, CompiledPart):
                function.weights.forget()


def _update(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give an argument its new value, unless the program has written it where it lies."""
    if target.data_ptr() == value.data_ptr() and target.numel():
        increment_version(target)
    else:
        target.copy_(value)


def _overlap(arguments: Sequence[Any], mutated: Sequence[int]) -> bool:
    """Whether a tensor that the graph changes shares storage with another argument."""
    storages = [
        a.untyped_storage().data_ptr() if isinstance(a, torch.Tensor) else 0 for a in arguments
    ]
    return any(storages[i] and storages.count(storages[i]) > 1 for i in mutated)


Maker = Callable[[Sequence[Any], Sequence[Any], Mapping[str, Any]], Any]


def _maker(output: Output) -> Maker | None:
    """How to make an output from arguments and results; None where it is the result as it is."""
    spec = output.tensor
    if output.kind == "constant":
        return lambda arguments, results, symbols: output.value
    if output.kind == "scalar":
        return lambda arguments, results, symbols: evaluate(output.value, symbols)
    if output.kind == "same":
        return lambda arguments, results, symbols: arguments[output.index]
    if spec is None:
        return None
    if output.kind == "alias":
        return _view_maker(output)
    if _is_row_major(spec.shape, spec.strides):
        return None
    return lambda arguments, results, symbols: layout.restride(
        results[output.index],
        evaluate_all(spec.shape, symbols),
        evaluate_all(spec.strides, symbols),
    )


def _view_maker(output: Output) -> Maker:
    spec = output.tensor
    assert spec is not None

    def make(arguments: Sequence[Any], results: Sequence[Any], symbols: Mapping[str, Any]) -> Any:
        base = (arguments if output.of == "input" else results)[output.index]
        if output.detached:
            base = base.detach()
        return base.as_strided(
            evaluate_all(spec.shape, symbols),
            evaluate_all(spec.strides, symbols),
            base.storage_offset() + evaluate(output.offset, symbols),
        )

    return make


def _is_row_major(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    if all(isinstance(s, int) for s in (*shape, *strides)):
        return layout.is_row_major(shape, strides)
    expected = _product(shape)
    return [str(s) for s in strides] == [str(e) for e in expected]


def _product(shape: Sequence[Any]) -> list[Any]:
    import sympy

    expected, running = [], sympy.Integer(1)
    for extent in reversed(shape):
        expected.append(running)
        running = running * sympy.sympify(extent)
    return expected[::-1]
