"""Finds the arguments in whose memory a program writes.

IREE updates an argument in place where its last use is the destination of a scatter, a sort or a
slice: it takes buffers that it is given for its own. Callers must hand over a copy of such
arguments, unless they want them changed.
"""

from __future__ import annotations

from collections.abc import Iterator

from iree.compiler import ir

_READ = 1  # IREE::Stream::ResourceAccessBitfield
_HARMLESS = {"stream.tensor.export", "util.return", "stream.resource.size"}


def _nested(op: ir.Operation) -> Iterator[ir.Operation]:
    for region in op.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _nested(inner.operation)


def _resources(op: ir.Operation) -> list[ir.Value]:
    return [v for v in op.operands if str(v.type).startswith("!stream.resource")]


def _writes(execute: ir.Operation) -> Iterator[ir.Value]:
    """The resources of a `stream.cmd.execute`'s region that commands in it write."""
    for op in _nested(execute):
        if op.name == "stream.cmd.dispatch":
            accesses = op.attributes["resource_accesses"]
            for value, access in zip(_resources(op), accesses, strict=True):
                if ir.IntegerAttr(access).value != _READ:
                    yield value
        elif op.name == "stream.cmd.copy":
            yield _resources(op)[1]
        elif op.name not in ("stream.cmd.concurrent", "stream.cmd.serial", "stream.yield"):
            yield from _resources(op)


def _is_written(value: ir.Value) -> bool:
    for use in value.uses:
        op = use.owner.operation
        if op.name == "stream.cmd.execute":
            argument = op.regions[0].blocks[0].arguments[use.operand_number]
            if any(written == argument for written in _writes(op)):
                return True
        elif op.name == "stream.resource.subview":
            if _is_written(op.results[0]):
                return True
        elif op.name not in _HARMLESS:
            return True
    return False


def written_arguments(module: ir.Module) -> tuple[int, ...]:
    """Positions of the written arguments of a module after IREE's `stream` phase."""
    found = set()
    for function in module.body.operations:
        if function.operation.name != "util.func":
            continue
        for op in _nested(function.operation):
            if op.name == "stream.tensor.import" and _is_written(op.results[0]):
                found.add(ir.BlockArgument(op.operands[0]).arg_number)
    return tuple(sorted(found))
