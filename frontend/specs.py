"""Torch's dtypes, sizes and tensors as the plain data of a Signature."""

from __future__ import annotations

from typing import Any

import torch

from .signature import Size, TensorSpec


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 as "float32"."""
    return str(dtype).removeprefix("torch.")


def size(value: Any) -> Size:
    """A size of torch's, maybe symbolic, as one of a Signature's."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        expression = value.node.expr
        return str(expression) if expression.free_symbols else value.node.pytype(expression)
    return value


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """dtype, shape and strides of a tensor, fake or not."""
    shape = tuple(map(size, tensor.shape))
    return TensorSpec(dtype_name(tensor.dtype), shape, tuple(map(size, tensor.stride())))
