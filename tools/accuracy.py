"""How far results are from those in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _Wider(TorchFunctionMode):
    """Reads float32 as float64, for models that cast to float32 in some places."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*wide, **named)


def floats(outputs: Any) -> list[Tensor]:
    """The floating-point tensors among a model's outputs."""
    leaves = pytree.tree_leaves(outputs)
    return [x.detach() for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def reference(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """What the module gives in eager float64, without gradients."""
    twin = copy.deepcopy(module).double()
    args, kwargs = pytree.tree_map(_double, (tuple(args), dict(kwargs)))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), _Wider():
            return floats(twin(*args, **kwargs))
    finally:
        torch.set_default_dtype(default)


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def error(outputs: Any, expected: Sequence[Tensor]) -> float:
    """The largest absolute error of any output, relative to that output's largest value.

    Raises ValueError for outputs of other shapes, or that are not finite.
    """
    found = floats(outputs)
    shapes = [tuple(x.shape) for x in found]
    if shapes != [tuple(x.shape) for x in expected]:
        raise ValueError(f"outputs have the shapes {shapes}")
    worst = 0.0
    for result, wanted in zip(found, expected, strict=True):
        if not result.isfinite().all():
            raise ValueError("an output is not finite")
        largest = wanted.abs().max().item() or 1.0
        worst = max(worst, (result.double() - wanted).abs().max().item() / largest)
    return worst
