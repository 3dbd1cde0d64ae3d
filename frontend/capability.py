"""Which nodes of a graph are left to eager PyTorch before anything is compiled, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch_mlir.extras.fx_importer import TORCH_DTYPE_TO_MLIR_TYPE_ASM

from ..dialects.context import make_context
from .graphs import calls, is_random, is_scalar, tensors, values

aten = torch.ops.aten

BY_DESIGN = ""
"""The reason of nodes that lose nothing in eager: they get no warning."""

_UNKNOWN = "torch-mlir does not know it"
EXPANDABLE = {_UNKNOWN}
"""Reasons that may not hold for the ops that PyTorch decomposes an op into."""

_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}

# Ops that only rename or copy elements of their first operand.
_MOVES = {
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}

# f64 functions for which IREE emits calls into a libm that its executables do not link.
_NEEDS_LIBM = {
    f"aten::{name}"
    for name in (
        "acos acosh asin asinh atan atan2 atanh cos cosh erf erfc erfinv gelu lgamma log10 log2 "
        "sin sinc sinh tan tanh digamma expm1 mish"
    ).split()
}


@cache
def _is_known_to_torch_mlir(name: str) -> bool:
    return make_context().is_registered_operation(name)


def _higher_order(node: fx.Node) -> str | None:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return "control flow and other higher-order operators run in eager"
    return None


def _data_dependent(node: fx.Node) -> str | None:
    if any(v is not None and free_unbacked_symbols(v) for v in values(node)):
        return "its result's size depends on data"
    return None


def _random(node: fx.Node) -> str | None:
    # torch's own generator draws, so that torch.manual_seed gives eager's numbers.
    return BY_DESIGN if is_random(node) else None


def _assertion(node: fx.Node) -> str | None:
    # What has an effect and no result checks something.
    return BY_DESIGN if node.is_impure() and not node.users else None


def _dtype(node: fx.Node) -> str | None:
    for tensor in tensors((node, *node.all_input_nodes)):
        if tensor.dtype not in _DTYPES or tensor.dtype not in TORCH_DTYPE_TO_MLIR_TYPE_ASM:
            return f"{tensor.dtype} is not compiled"
        if tensor.is_quantized or tensor.layout != torch.strided:
            return f"tensors of layout {tensor.layout} are not compiled"
    return None


def _empty(node: fx.Node) -> str | None:
    def is_empty(tensor: torch.Tensor) -> bool:
        return any(isinstance(extent, int) and extent == 0 for extent in tensor.shape)

    made = list(tensors((node,)))
    if (made and all(map(is_empty, made))) or any(map(is_empty, tensors(node.all_input_nodes))):
        return BY_DESIGN
    return None


def _unknown(node: fx.Node) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    namespace, name = schema.name.split("::")
    if namespace not in ("aten", "prims"):
        return "a custom operator"
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    if not _is_known_to_torch_mlir(f"torch.{namespace}.{name}{overload}"):
        return _UNKNOWN
    return None


def _libm(node: fx.Node) -> str | None:
    if getattr(getattr(node.target, "_schema", None), "name", None) in _NEEDS_LIBM and any(
        tensor.dtype == torch.float64 for tensor in tensors((node,))
    ):
        return "its float64 form needs a libm"
    return None


def _is_integral(node: fx.Node) -> bool:
    return not any(t.is_floating_point() for t in tensors(node.all_input_nodes))


# In these uint8 comes to the same as int8, of which IREE takes it for.
_SAME_UNSIGNED = {
    f"aten::{name}"
    for name in (
        "_to_copy add add_ alias any bitwise_and bitwise_not bitwise_or bitwise_xor cat clone "
        "contiguous copy detach embedding empty_like eq expand fill flatten flip full full_like "
        "gather index index_put index_select logical_and logical_not logical_or masked_fill mul "
        "ne ones_like permute repeat reshape select slice split squeeze stack sub t transpose "
        "unflatten unsqueeze view where zeros_like"
    ).split()
}


def _unsigned(node: fx.Node) -> str | None:
    name = getattr(getattr(node.target, "_schema", None), "name", None)
    if name is None or name in _SAME_UNSIGNED:
        return None
    if any(t.dtype is torch.uint8 for t in tensors((node, *node.all_input_nodes))):
        return "IREE takes uint8 for int8"
    return None


# Ops whose lowering is wrong in some form, with the arguments for which it is, and how.
_WRONG: dict[str, tuple[Callable[[fx.Node], bool], str]] = {
    **dict.fromkeys(
        ("aten::argmax", "aten::argmin", "aten::max.dim", "aten::min.dim"),
        (lambda node: next(tensors(node.all_input_nodes)).is_floating_point(), "it ignores NaN"),
    ),
    **dict.fromkeys(
        ("aten::sort", "aten::sort.stable", "aten::topk", "aten::argsort", "aten::argsort.stable"),
        (lambda node: next(tensors(node.all_input_nodes)).is_floating_point(), "NaN has no order"),
    ),
    **dict.fromkeys(
        ("aten::grid_sampler", "aten::grid_sampler_2d"),
        (lambda node: True, "samples outside of the image are wrong"),
    ),
    **dict.fromkeys(
        ("aten::atan", "aten::atan2"),
        (lambda node: True, "its approximation is off by 1e-6"),
    ),
    **dict.fromkeys(
        (
            *("aten::div.Tensor_mode", "aten::floor_divide", "aten::remainder.Tensor"),
            *("aten::fmod.Tensor", "aten::__rshift__.Tensor"),
        ),
        (lambda node: _is_integral(node), "a division by zero would not be noticed"),
    ),
    "aten::leaky_relu_backward": (lambda node: True, "its lowering gives wrong numbers"),
}


def _wrong(node: fx.Node) -> str | None:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    applies, reason = _WRONG.get(name, (None, ""))
    return reason if applies is not None and applies(node) else None


_RULES: tuple[Callable[[fx.Node], str | None], ...] = (
    _higher_order,
    _data_dependent,
    _random,
    _assertion,
    _empty,
    _dtype,
    _unknown,
    _libm,
    _wrong,
    _unsigned,
)


def eager_nodes(graph: fx.Graph) -> dict[fx.Node, str]:
    """The nodes that are not compiled, with the reason of each."""
    found: dict[fx.Node, str] = {}
    for node in calls(graph):
        rules = (_data_dependent,) if is_scalar(node) else _RULES
        reason = next((r for rule in rules if (r := rule(node)) is not None), None)
        if reason is not None:
            found[node] = reason
    for node in _moved_inputs(graph):
        found.setdefault(node, BY_DESIGN)
    return found


def _moved_inputs(graph: fx.Graph) -> Iterator[fx.Node]:
    """Results that are an argument's elements, moved: a program would hand back its own input."""
    for result in graph.output_node().all_input_nodes:
        chain, node = [], result
        while node.op == "call_function" and node.target in _MOVES:
            chain.append(node)
            node = node.args[0]  # type: ignore[assignment]
        if node.op == "placeholder":
            yield from chain
