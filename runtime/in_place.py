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


def _writes(execute: ir.Operation) -> Iterator[tuple[ir.Value, bool]]:
    """The resources that commands in a `stream.cmd.execute` write; True where no kernel does it."""
    for op in _nested(execute):
        if op.name == "stream.cmd.dispatch":
            accesses = op.attributes["resource_accesses"]
            for value, access in zip(_resources(op), accesses, strict=True):
                if ir.IntegerAttr(access).value != _READ:
                    yield value, False
        elif op.name == "stream.cmd.copy":
            yield _resources(op)[1], True
        elif op.name not in ("stream.cmd.concurrent", "stream.cmd.serial", "stream.yield"):
            yield from ((value, True) for value in _resources(op))


def _uses(value: ir.Value) -> Iterator[bool]:
    """One element for each write to a resource: whether a transfer, not a kernel, does it."""
    for use in value.uses:
        op = use.owner.operation
        if op.name == "stream.cmd.execute":
            argument = op.regions[0].blocks[0].arguments[use.operand_number]
            yield from (transfer for written, transfer in _writes(op) if written == argument)
        elif op.name == "stream.resource.subview":
            yield from _uses(op.results[0])
        elif op.name not in _HARMLESS:
            yield True


def written_arguments(module: ir.Module) -> dict[int, bool]:
    """The written arguments of a module after IREE's `stream` phase, by position.

    True where a transfer writes: the runtime allows that only in buffers that it has allocated.
    """
    found: dict[int, bool] = {}
    for function in module.body.operations:
        if function.operation.name != "util.func":
            continue
        for op in _nested(function.operation):
            if op.name == "stream.tensor.import" and (writes := list(_uses(op.results[0]))):
                found[ir.BlockArgument(op.operands[0]).arg_number] = any(writes)
    return dict(sorted(found.items()))
