"""Flambeau: a compiler stack for PyTorch built on MLIR.

The public API, and the one place where the folders meet. Names load on first use, so that
`flambeau.runtime` works where there is no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from . import errors
    from .frontend.compile import Build
    from .frontend.module import CompiledModule
    from .runtime.targets import Target

__version__ = "0.1.0"

__all__ = ["CompiledModule", "compile_module", "config", "errors"]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module(".errors", __name__)
    if name == "CompiledModule":
        return importlib.import_module(".frontend.module", __name__).CompiledModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def compile_module(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | Target = "llvm-cpu",
    dynamic_shapes: Any = None,
    strict: bool = False,
    pipeline: str | Sequence[str] | None = None,
) -> CompiledModule:
    """Compile a module to a native program for the shapes and dtypes of example arguments.

    `args` and `kwargs` are what the module would be called with; tensors, numbers and containers
    of them. `dynamic_shapes` is torch.export's: which sizes, and which ints, vary between calls.
    With `strict` an operator that can't be compiled raises instead of running in eager.
    `pipeline` names the passes to run, or lists them; then their failure is an error too.

    Raises InputError for arguments that no program takes, CaptureError where the module isn't one
    graph, UnsupportedOp under `strict`, TargetError for an unknown target, PassFailed or
    TargetError where a pass or the target's compiler fails on a graph.
    """
    import torch

    from .errors import InputError
    from .frontend.checks import refuse_arguments
    from .frontend.module import CompiledModule

    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    refuse_arguments(args, kwargs)
    return CompiledModule(
        model,
        tuple(args),
        dict(kwargs or {}),
        dynamic_shapes=dynamic_shapes,
        build=_build(target, pipeline),
        strict=strict,
        recover=pipeline is None,
    )


def _build(target: str | Target, pipeline: str | Sequence[str] | None = None) -> Build:
    """How the frontend has a graph compiled: passes, then the target's compiler."""
    from .passes.manager import elements, run_guarded
    from .runtime.compiler import compile_bytecode
    from .runtime.session import Program
    from .runtime.targets import Target

    parsed = Target.parse(target)
    passes = [*elements("inference" if pipeline is None else pipeline), "bind"]

    def build(bytecode: bytes, stages: dict[str, bytes]) -> Any:
        stages["torch"] = bytecode
        stages["lowered"] = run_guarded(bytecode, passes)
        return Program(compile_bytecode(stages["lowered"], parsed), parsed)

    return build


def _torch_compile_backend(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="flambeau", options={"strict": True})`."""
    from .errors import InputError
    from .frontend.backend import compile_dynamo

    given = dict(options or {})
    strict = bool(given.pop("strict", False))
    target = given.pop("target", "llvm-cpu")
    if given:
        raise InputError(f"unknown options {sorted(given)}; there are: strict, target")
    return compile_dynamo(graph, example_inputs, _build(target), strict)
