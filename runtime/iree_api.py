"""IREE's compiler API in this process: source in, executable out, diagnostics as text.

`iree.compiler.api` does not expose the callback for diagnostics, so that one goes through ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from iree.compiler.api import Output, Session, Source, ctypes_dl

_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t, ctypes.c_void_p
)
_enable_diagnostics = ctypes_dl._dylib.ireeCompilerInvocationEnableCallbackDiagnostics
_enable_diagnostics.restype = None
_enable_diagnostics.argtypes = [ctypes.c_void_p, ctypes.c_int, _CALLBACK, ctypes.c_void_p]


class CompilationFailed(Exception):
    """IREE refused the program; the message is all of its diagnostics."""


def compile_source(source: bytes, flags: Sequence[str]) -> bytes:
    """Compile MLIR text or bytecode into a VM module. Raises CompilationFailed."""
    session = Session()
    session.set_flags(*flags)
    invocation = session.invocation()
    diagnostics: list[str] = []

    def record(_severity: int, text: ctypes._Pointer, size: int, _data: None) -> None:
        diagnostics.append(ctypes.string_at(text, size).decode(errors="replace"))

    callback = _CALLBACK(record)
    _enable_diagnostics(invocation._inv_p, 0, callback, None)
    try:
        parsed = invocation.parse_source(Source.wrap_buffer(session, source, buffer_name="model"))
        if not (parsed and invocation.execute()):
            raise CompilationFailed("\n".join(diagnostics))
        output = Output.open_membuffer()
        invocation.output_vm_bytecode(output)
        return bytes(output.map_memory())
    finally:
        invocation.close()
