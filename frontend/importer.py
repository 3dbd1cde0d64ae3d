"""A functional ATen graph to the torch dialect, by torch-mlir's FxImporter, without weights."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch_mlir import ir
from torch_mlir.extras.fx_importer import ContextCache, FxImporter

from ..dialects.context import make_context
from ..errors import UnsupportedOp
from ..passes.bind_parameters import PARAMETER
from .graphs import calls, is_scalar, placeholders

ENTRY = "main"

aten = torch.ops.aten


class _NamedLocations(ContextCache):
    """Source lines as torch-mlir finds them, under the name of the node."""

    def get_node_location(self, node: fx.Node) -> ir.Location | None:
        line = super().get_node_location(node)
        return ir.Location.name(node.name, line, context=self._c)


def import_graph(graph: fx.Graph, parameters: Mapping[int, str]) -> bytes:
    """Import as function `main`, in bytecode.

    `parameters` names the arguments that the runtime provides once, at load. Raises UnsupportedOp
    for what FxImporter has no word for.
    """
    context = make_context()
    importer = FxImporter(context=context)
    importer._cc = _NamedLocations(context, py_attr_tracker=importer._py_attr_tracker)
    _spell_as_torch_dialect(graph)
    try:
        function = importer.import_stateless_graph(graph, func_name=ENTRY)
    except Exception as error:
        raise UnsupportedOp(f"torch-mlir's importer: {type(error).__name__}: {error}") from error
    with context:
        marks = [ir.DictAttr.get({}) for _ in placeholders(graph)]
        for i, key in parameters.items():
            marks[i] = ir.DictAttr.get({PARAMETER: ir.StringAttr.get(key)})
        function.attributes["arg_attrs"] = ir.ArrayAttr.get(marks)
    buffer = io.BytesIO()
    importer.module_op.write_bytecode(buffer)
    return buffer.getvalue()


_ADDS_A_DIM = {aten.unsqueeze.default, aten.stack.default}


def _count_from_start(node: fx.Node) -> None:
    """Replace negative dims and positions: torch-mlir loses some of them, and dies of others."""
    schema = node.target._schema
    operand = next((n for n in node.all_input_nodes if not is_scalar(n)), None)
    value = operand.meta.get("val") if operand is not None else None
    if not isinstance(value, torch.Tensor):
        return
    rank = value.dim() + (node.target in _ADDS_A_DIM)
    for i, (argument, given) in enumerate(zip(schema.arguments, node.args, strict=False)):
        if type(given) is not int or given >= 0 or rank == 0:
            continue
        if argument.name in ("dim", "dim0", "dim1"):
            node.update_arg(i, given + rank)
        elif argument.name == "index":
            extent = value.shape[node.args[i - 1] % rank]
            if isinstance(extent, int):
                node.update_arg(i, given + extent)


_SYNONYMS = {
    aten.__and__: aten.bitwise_and,
    aten.__or__: aten.bitwise_or,
    aten.__xor__: aten.bitwise_xor,
    aten.__lshift__: aten.bitwise_left_shift,
    aten.__rshift__: aten.bitwise_right_shift,
}


def _spell_as_torch_dialect(graph: fx.Graph) -> None:
    """Name ops as torch-mlir lowers them: one of two synonyms, scalar overloads for numbers."""
    for node in calls(graph):
        op: Any = node.target
        if not isinstance(op, torch._ops.OpOverload):
            continue
        if op.overloadpacket in _SYNONYMS:
            packet = _SYNONYMS[op.overloadpacket]
            number = "Tensor_Scalar" if "Scalar" not in packet.overloads() else "Scalar"
            op = node.target = getattr(packet, "Tensor" if op._overloadname == "Tensor" else number)
        _count_from_start(node)
        operand = node.args[1] if len(node.args) > 1 else None
        if (
            op._overloadname == "Tensor"
            and isinstance(operand, fx.Node)
            and is_scalar(operand)
            and "Scalar" in op.overloadpacket.overloads()
        ):
            node.target = op.overloadpacket.Scalar
