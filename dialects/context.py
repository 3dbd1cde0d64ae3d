"""Makes MLIR contexts of torch-mlir's with every dialect that Flambeau's passes use."""

from __future__ import annotations

from torch_mlir import ir
from torch_mlir.dialects import torch as torch_dialect


def make_context() -> ir.Context:
    """A fresh context. Ops of IREE's dialects (`util.global`) are carried as unregistered ones."""
    context = ir.Context()
    torch_dialect.register_dialect(context)
    context.allow_unregistered_dialects = True
    return context
