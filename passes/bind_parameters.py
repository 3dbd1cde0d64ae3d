"""Turns the weight arguments of a function into parameters that the runtime provides at load."""

from __future__ import annotations

import re

from torch_mlir import ir

from .registry import register

PARAMETER = "flambeau.parameter"
"""Argument attribute of weights: the key under which the runtime provides the value."""

SCOPE = "model"
"""IREE's name for the collection of parameters that a program loads from."""

_VTENSOR = re.compile(r"^!torch\.vtensor<\[(.*)\],(.*)>$")


def builtin_type(type_: ir.Type) -> ir.Type:
    """The builtin tensor type of a torch.vtensor type: `[2,?],si64` becomes `tensor<2x?xi64>`."""
    match = _VTENSOR.match(str(type_))
    if match is None:
        raise ValueError(f"not a ranked torch.vtensor with a dtype: {type_}")
    dims, element = match.groups()
    shape = "".join(f"{dim}x" for dim in dims.split(",") if dim)
    return ir.Type.parse(f"tensor<{shape}{re.sub('^[su]i', 'i', element)}>")


def _global(module: ir.Operation, key: str, type_: ir.Type) -> None:
    with ir.InsertionPoint.at_block_begin(module.regions[0].blocks[0]):
        ir.Operation.create(
            "util.global",
            attributes={
                "sym_name": ir.StringAttr.get(key),
                "sym_visibility": ir.StringAttr.get("private"),
                "type": ir.TypeAttr.get(type_),
                "initial_value": ir.Attribute.parse(
                    f'#stream.parameter.named<"{SCOPE}"::"{key}"> : {type_}'
                ),
            },
        )


def _load(block: ir.Block, key: str, type_: ir.Type, as_type: ir.Type) -> ir.Value:
    symbol = {"global": ir.FlatSymbolRefAttr.get(key)}
    with ir.InsertionPoint.at_block_begin(block):
        value = ir.Operation.create("util.global.load", [type_], attributes=symbol).result
        return ir.Operation.create("torch_c.from_builtin_tensor", [as_type], [value]).result


def _bind(module: ir.Operation, function: ir.Operation) -> None:
    if "arg_attrs" not in function.attributes:
        return
    entry = function.regions[0].blocks[0]
    attributes = [{a.name: a.attr for a in d} for d in function.attributes["arg_attrs"]]
    old = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    kept = [i for i, named in enumerate(attributes) if PARAMETER not in named]
    for i in reversed(range(len(attributes))):
        if i in kept:
            continue
        key = ir.StringAttr(attributes[i][PARAMETER]).value
        argument = entry.arguments[i]
        type_ = builtin_type(argument.type)
        _global(module, key, type_)
        argument.replace_all_uses_with(_load(entry, key, type_, argument.type))
        entry.erase_argument(i)
    new = ir.FunctionType.get([old.inputs[i] for i in kept], old.results)
    function.attributes["function_type"] = ir.TypeAttr.get(new)
    del function.attributes["arg_attrs"]


@register("bind-parameters")
def bind_parameters(module: ir.Operation) -> None:
    """Replace arguments marked `flambeau.parameter` by loads of named parameters."""
    with module.context, ir.Location.unknown():
        for op in list(module.regions[0].blocks[0].operations):
            if op.operation.name == "func.func":
                _bind(module, op.operation)
