"""Refuses arguments that a compiled module does not take, by name, before native code sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import InputError
from .signature import Input, Symbol, TensorSpec, evaluate_all

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def refuse_tensor(name: str, value: Any) -> None:
    """Raise InputError for a tensor that no compiled program takes."""
    if not isinstance(value, torch.Tensor):
        return
    if is_traceable_wrapper_subclass(value):
        raise InputError(f"{name} is a {type(value).__name__}; plain tensors are compiled")
    if value.layout != torch.strided or value.is_quantized:
        raise InputError(f"{name} has layout {value.layout}; a dense tensor is expected")
    if value.device.type != "cpu":
        raise InputError(f"{name} is on device {value.device}; a tensor on cpu is expected")


def refuse_arguments(args: Any, kwargs: Any) -> None:
    """Raise InputError for example arguments that no compiled program takes."""
    if isinstance(args, torch.Tensor) or not isinstance(args, Sequence):
        raise InputError(f"args must be a tuple of arguments, got {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(f"kwargs must be a dict or None, got {type(kwargs).__name__}")
    leaves, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs or {})))
    for (where, *path), leaf in leaves:
        root = "args" if where.idx == 0 else "kwargs"
        refuse_tensor(root + pytree.keystr(tuple(path)), leaf)


def _words(spec: TensorSpec) -> str:
    return f"a {spec.dtype} tensor of shape [{', '.join(map(str, spec.shape))}]"


class Check:
    """What one argument of a compiled module has to be."""

    def __init__(self, given: Input):
        self.given = given
        spec = given.tensor
        self._dtype = getattr(torch, spec.dtype) if spec else None
        static = spec is not None and all(isinstance(extent, int) for extent in spec.shape)
        self._shape = torch.Size(spec.shape) if spec and static else None  # type: ignore[arg-type]

    def matches(self, value: Any) -> bool:
        """Whether the value is like the example's: cheap, and False in doubt."""
        if self._shape is not None:
            return (
                type(value) in _PLAIN_TYPES
                and value.dtype is self._dtype
                and value.shape == self._shape
                and value.is_cpu
                and value.layout is torch.strided
                and value.is_contiguous()
            )
        if self._dtype is not None or self.given.symbol is not None:
            return False
        return self._is_constant(value)

    def _is_constant(self, value: Any) -> bool:
        constant = self.given.constant
        return value is constant or (type(value) is type(constant) and value == constant)

    def verify_type(self, value: Any) -> None:
        """Raise InputError where the value is of another kind, dtype, rank or device."""
        given, spec = self.given, self.given.tensor
        if spec is not None:
            if not isinstance(value, torch.Tensor):
                raise InputError(f"{given.name}: expected {_words(spec)}, got {value!r}")
            refuse_tensor(given.name, value)
            if value.dtype is not self._dtype or value.dim() != len(spec.shape):
                self._refuse(value)
        elif given.symbol is not None:
            if type(value) not in (int, float):
                raise InputError(f"{given.name}: expected a number, got {value!r}")
        elif not self._is_constant(value):
            raise InputError(
                f"{given.name} was {given.constant!r} when the module was compiled, got {value!r}. "
                "Pass a tensor, name an int in dynamic_shapes, or compile for this value too."
            )

    def verify_sizes(self, value: Any, symbols: Mapping[str, Any]) -> None:
        """Raise InputError where the shape is not the expected one under these sizes."""
        spec = self.given.tensor
        if spec is not None and tuple(value.shape) != evaluate_all(spec.shape, symbols):
            self._refuse(value)

    def verify_range(self, symbol: Symbol, value: Any) -> None:
        """Raise InputError where a size is above its upper bound, or below one asked for."""
        low = symbol.lower if symbol.lower is not None and symbol.lower > 2 else None
        if (low is not None and value < low) or (symbol.upper is not None and value > symbol.upper):
            where = self.given.name + ("" if symbol.dim is None else f".shape[{symbol.dim}]")
            raise InputError(f"{where} must be in [{symbol.lower}, {symbol.upper}], got {value}")

    def _refuse(self, value: torch.Tensor) -> None:
        spec = self.given.tensor
        assert spec is not None
        dtype = str(value.dtype).removeprefix("torch.")
        raise InputError(
            f"{self.given.name}: expected {_words(spec)}, "
            f"got a {dtype} tensor of shape {list(value.shape)}"
        )
