"""MLIR bytecode and a target to an executable, in a helper process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import guard
from ..config import config
from ..errors import TargetError
from ..reproducer import write_reproducer
from .targets import Target


@dataclass(frozen=True)
class Executable:
    """IREE's executable format; how many results it has, which arguments it writes (`in_place`)."""

    code: bytes
    results: int
    written: dict[int, bool]


def _compile(bytecode: bytes, flags: Sequence[str]) -> Executable:
    from . import iree_api

    try:
        return Executable(*iree_api.compile_source(bytecode, flags))
    except (iree_api.CompilationFailed, ValueError) as failure:
        raise TargetError(str(failure)) from None


def _to_text(bytecode: bytes) -> str:
    from iree.compiler import ir

    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        return str(ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=True))


def compile_bytecode(bytecode: bytes, target: Target) -> Executable:
    """Compile for the target.

    Raises TargetError, with a reproducer, when IREE fails, crashes or overruns
    `config.compile_timeout`.
    """
    try:
        return guard.call(_compile, bytecode, target.flags, timeout=config.compile_timeout)
    except TargetError as failure:
        diagnostics = str(failure)
        message = f"IREE could not compile the program for {target.name}:\n{_first(diagnostics)}"
    except guard.HelperDied as death:
        diagnostics = death.stderr
        message = f"IREE {death} on the program for {target.name}:\n{_first(diagnostics)}"
    command = f"iree-compile FILE -o /dev/null {' '.join(target.flags)}"
    raise TargetError(message, write_reproducer(bytecode, _to_text, command), diagnostics)


def _first(diagnostics: str, limit: int = 1000) -> str:
    return diagnostics if len(diagnostics) <= limit else diagnostics[:limit] + " ..."
