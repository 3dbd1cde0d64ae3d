"""Lets f16 and bf16 ops compute in f32, as ATen's CPU kernels do, and round each result once."""

from __future__ import annotations

import re

from torch_mlir import ir

from .registry import register

_HALF = re.compile(r"^(!torch\.vtensor<.*),(f16|bf16)>$")
_DTYPE_CODE = {"f16": 5, "f32": 6, "bf16": 15}  # c10::ScalarType

# Ops that only move or convert elements are exact in any type.
_EXACT = {
    f"torch.{name}"
    for name in (
        "aten._to_copy aten._unsafe_view aten.alias aten.broadcast_to aten.cat aten.clone "
        "aten.constant_pad_nd aten.contiguous aten.copy aten.detach aten.embedding aten.expand "
        "aten.expand_as aten.flatten.using_ints aten.flip aten.gather aten.index.Tensor "
        "aten.index_select aten.masked_fill.Scalar aten.masked_fill.Tensor aten.narrow "
        "aten.permute aten.pixel_shuffle aten.repeat aten.reshape aten.roll aten.select.int "
        "aten.select_scatter aten.slice.Tensor aten.slice_scatter aten.split.Tensor "
        "aten.split_with_sizes aten.squeeze aten.squeeze.dim aten.stack aten.t aten.to.device "
        "aten.to.dtype aten.to.dtype_layout aten.transpose.int aten.tril aten.triu aten.type_as "
        "aten.unflatten.int aten.unsqueeze aten.view aten.where.self prims.convert_element_type "
        "prim.ListConstruct prim.ListUnpack"
    ).split()
}


def _element(value: ir.Value) -> str | None:
    match = _HALF.match(str(value.type))
    return match.group(2) if match else None


def _as_type(type_: ir.Type, element: str) -> ir.Type:
    match = _HALF.match(str(type_))
    return ir.Type.parse(f"{match.group(1)},{element}>") if match else type_


def _convert(value: ir.Value, element: str, type_: ir.Type) -> ir.Value:
    code = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), _DTYPE_CODE[element])
    integer = ir.Type.parse("!torch.int")
    dtype = ir.Operation.create("torch.constant.int", [integer], attributes={"value": code}).result
    return ir.Operation.create("torch.prims.convert_element_type", [type_], [value, dtype]).result


def _compute_in_f32(op: ir.Operation) -> None:
    with op.location, ir.InsertionPoint(op):
        operands = [
            _convert(v, "f32", _as_type(v.type, "f32")) if _element(v) else v for v in op.operands
        ]
        wide = ir.Operation.create(
            op.name,
            [_as_type(result.type, "f32") for result in op.results],
            operands,
            attributes={named.name: named.attr for named in op.attributes},
        )
        for old, new in zip(op.results, wide.results, strict=True):
            element = _element(old)
            narrow = _convert(new, element, old.type) if element else new
            old.replace_all_uses_with(narrow)
    op.erase()


@register("half-opmath")
def half_opmath(module: ir.Operation) -> None:
    """Widen the operands of f16 and bf16 arithmetic to f32 and round its results.

    Comparisons stay in their own type: ATen rounds their scalar operand to it.
    """
    targets: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if (
            op.name.startswith("torch.aten.")
            and op.name not in _EXACT
            and len(op.regions) == 0
            and any(map(_element, op.operands))
            and not any(str(result.type).endswith(",i1>") for result in op.results)
        ):
            targets.append(op)
        return ir.WalkResult.ADVANCE

    module.walk(visit)
    with module.context:
        for op in targets:
            _compute_in_f32(op)
