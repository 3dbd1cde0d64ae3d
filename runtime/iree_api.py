"""IREE's compiler API in this process: source in, executable out, diagnostics as text.

`iree.compiler.api` exposes neither phases nor the callback for diagnostics: those go through
ctypes, to the C functions of iree/compiler/embedding_api.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from iree.compiler import ir
from iree.compiler.api import Invocation, Output, Session, ctypes_dl

from .in_place import written_arguments

_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t, ctypes.c_void_p
)


def _function(name: str, *arguments: Any) -> Any:
    function = getattr(ctypes_dl._dylib, name)
    function.restype = None
    function.argtypes = [ctypes.c_void_p, *arguments]
    return function


_enable_diagnostics = _function(
    "ireeCompilerInvocationEnableCallbackDiagnostics", ctypes.c_int, _CALLBACK, ctypes.c_void_p
)
_from_phase = _function("ireeCompilerInvocationSetCompileFromPhase", ctypes.c_char_p)
_to_phase = _function("ireeCompilerInvocationSetCompileToPhase", ctypes.c_char_p)


class CompilationFailed(Exception):
    """IREE refused the program; the message is all of its diagnostics."""


def _run(session: Session, module: ir.Module, start: str | None, stop: str | None) -> Invocation:
    """Run IREE's phases after `start` up to `stop` on the module, in place."""
    invocation = session.invocation()
    diagnostics: list[str] = []

    def record(_severity: int, text: Any, size: int, _data: None) -> None:
        diagnostics.append(ctypes.string_at(text, size).decode(errors="replace"))

    callback = _CALLBACK(record)
    _enable_diagnostics(invocation._inv_p, 0, callback, None)
    if start is not None:
        _from_phase(invocation._inv_p, start.encode())
    if stop is not None:
        _to_phase(invocation._inv_p, stop.encode())
    invocation.import_module(module.operation)
    if not invocation.execute():
        raise CompilationFailed("\n".join(diagnostics))
    # The invocation calls back until it is closed.
    invocation.diagnostics_callback = callback
    return invocation


def _result_count(module: ir.Module) -> int:
    """Of the function `main`; functions of other names are not called from outside."""
    for function in module.body.operations:
        attributes = function.operation.attributes
        if "function_type" in attributes and ir.StringAttr(attributes["sym_name"]).value == "main":
            return len(ir.FunctionType(ir.TypeAttr(attributes["function_type"]).value).results)
    raise CompilationFailed("the module has no function called main")


def compile_source(source: bytes, flags: Sequence[str]) -> tuple[bytes, int, dict[int, bool]]:
    """Compile MLIR text or bytecode into a VM module.

    Returns it with the number of results of its function, and the arguments in whose memory it
    writes (see `in_place`). Raises CompilationFailed.
    """
    session = Session()
    session.set_flags(*flags)
    try:
        module = ir.Module.parse(source, session.context)
    except ir.MLIRError as error:
        raise CompilationFailed(str(error)) from None
    results = _result_count(module)
    _run(session, module, None, "stream").close()
    written = written_arguments(module)
    invocation = _run(session, module, "stream", None)
    try:
        output = Output.open_membuffer()
        invocation.output_vm_bytecode(output)
        return bytes(output.map_memory()), results, written
    finally:
        invocation.close()
