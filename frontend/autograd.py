"""Gradients of a compiled graph: the forward pass runs compiled, the backward pass in eager.

Backward runs the graph again in eager PyTorch, recording, and differentiates that; so it is
right to any order, custom autograd functions and `no_grad` regions included. Graphs that
draw random numbers, change their arguments or return views of them run in eager as a whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import FallbackWarning, UnsupportedOp
from .capture import Captured
from .graphs import is_random

Call = Callable[[Sequence[Any]], Sequence[Any]]

_noticed: set[str] = set()


def requires_grad(value: Any) -> bool:
    """Whether autograd follows this argument."""
    return isinstance(value, torch.Tensor) and value.requires_grad


class Differentiable:
    """An executor with gradients, over the same flat arguments."""

    def __init__(self, call: Call, captured: Captured, strict: bool):
        self.call = call
        self.eager = captured.run_eager
        self.strict = strict
        self._whole = not _is_recomputable(captured)

    def __call__(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """The outputs, attached to the arguments that require gradients."""
        if self._whole:
            self.notice("a graph that trains and draws, mutates or returns views runs in eager")
            return self.eager(arguments)
        return _Recomputed.apply(self, *arguments)

    def notice(self, what: str) -> None:
        """Say once in a process what runs in eager; raise instead under strict."""
        message = f"flambeau: {what}: its gradients are eager PyTorch's"
        if self.strict:
            raise UnsupportedOp(message)
        if what not in _noticed:
            _noticed.add(what)
            warnings.warn(message, FallbackWarning, stacklevel=3)


def _is_recomputable(captured: Captured) -> bool:
    signature = captured.signature
    return (
        not signature.mutations
        and all(output.kind not in ("alias", "same") for output in signature.outputs)
        and not any(map(is_random, captured.module.graph.nodes))
        and not torch.is_autocast_enabled("cpu")
    )


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: Differentiable, *arguments: Any) -> Any:
        ctx.owner = owner
        tensors = [a if isinstance(a, torch.Tensor) else None for a in arguments]
        ctx.others = [None if isinstance(a, torch.Tensor) else a for a in arguments]
        ctx.save_for_backward(*tensors)
        outputs = tuple(owner.call(arguments))
        ctx.mark_non_differentiable(
            *(o for o in outputs if isinstance(o, torch.Tensor) and not o.is_floating_point())
        )
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.owner.notice("the backward pass of a compiled graph runs in eager")
        arguments = [
            other if tensor is None else tensor
            for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        with torch.enable_grad():
            # Views of their own, so that the graph recorded here ends at this call's arguments.
            arguments = [a.view_as(a) if requires_grad(a) else a for a in arguments]
            outputs = ctx.owner.eager(arguments)
        wanted = [i for i, a in enumerate(arguments) if requires_grad(a)]
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and requires_grad(output)
        ]
        result: list[Any] = [None] * (len(arguments) + 1)
        if pairs:
            found = torch.autograd.grad(
                [output for output, _ in pairs],
                [arguments[i] for i in wanted],
                [gradient for _, gradient in pairs],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
            for i, gradient in zip(wanted, found, strict=True):
                result[i + 1] = gradient
        return tuple(result)
