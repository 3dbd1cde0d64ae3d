"""Runs a pipeline over a module, in a helper process by default."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence

from torch_mlir import ir
from torch_mlir.passmanager import PassManager

from .. import guard
from ..config import config
from ..dialects.context import make_context
from ..errors import PassFailed
from ..reproducer import write_reproducer
from .pipelines import PIPELINES
from .registry import python_passes


def elements(pipeline: str | Sequence[str]) -> tuple[str, ...]:
    """The elements of a pipeline given by its name, as text or as a sequence of elements."""
    if not isinstance(pipeline, str):
        return tuple(element for name in pipeline for element in elements(name))
    if pipeline in PIPELINES:
        return PIPELINES[pipeline]
    anchored = re.fullmatch(r"\s*builtin\.module\((.*)\)\s*", pipeline, re.DOTALL)
    return tuple(_split(anchored.group(1) if anchored else pipeline))


def _split(text: str) -> Iterator[str]:
    """The elements of pipeline text: split at commas outside of brackets and braces."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        depth += (character in "({") - (character in ")}")
        if character == "," and depth == 0:
            yield text[start:position].strip()
            start = position + 1
    yield text[start:].strip()


def run(module: ir.Module, pipeline: str | Sequence[str]) -> None:
    """Run a pipeline here, in place. Raises ir.MLIRError or what a Python pass raises."""
    with module.context:
        manager = PassManager("builtin.module")
        for element in elements(pipeline):
            if element in python_passes():
                _add_python(manager, element)
            else:
                manager.add(element)
        manager.run(module.operation)


def _add_python(manager: PassManager, name: str) -> None:
    function = python_passes()[name]
    manager.add(lambda op, _: function(op), name=name, argument=name)


def _run_on_bytes(bytecode: bytes, pipeline: tuple[str, ...]) -> bytes:
    module = ir.Module.parse(bytecode, make_context())
    try:
        run(module, pipeline)
    except (ir.MLIRError, ValueError) as error:
        raise PassFailed(str(error)) from None
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def to_text(bytecode: bytes, debug_info: bool = True) -> str:
    """The module as MLIR text, with its locations if `debug_info`."""
    module = ir.Module.parse(bytecode, make_context())
    return str(module.operation.get_asm(enable_debug_info=debug_info))


def run_guarded(bytecode: bytes, pipeline: str | Sequence[str]) -> bytes:
    """Run a pipeline over bytecode in a helper process.

    Raises PassFailed, with a reproducer, when a pass fails, crashes or overruns
    `config.compile_timeout`.
    """
    names = elements(pipeline)
    try:
        return guard.call(_run_on_bytes, bytecode, names, timeout=config.compile_timeout)
    except PassFailed as failure:
        message, diagnostics = f"The pass pipeline failed:\n{failure}", str(failure)
    except guard.HelperDied as death:
        message, diagnostics = f"The pass pipeline {death}:\n{death.stderr[-2000:]}", death.stderr
    command = f"flambeau opt FILE --pass-pipeline='builtin.module({','.join(names)})'"
    raise PassFailed(message, write_reproducer(bytecode, to_text, command), diagnostics)
