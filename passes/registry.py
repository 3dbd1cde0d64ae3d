"""Names Python passes, so that pipelines can mix them with C++ ones."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

from torch_mlir import ir

PassFunction = Callable[[ir.Operation], None]

_PASSES: dict[str, PassFunction] = {}


def register(name: str) -> Callable[[PassFunction], PassFunction]:
    """Register a function over a builtin.module as the pass `name`; its docstring is the help."""

    def decorate(function: PassFunction) -> PassFunction:
        if name in _PASSES:
            raise ValueError(f"a pass called {name!r} is registered already")
        _PASSES[name] = function
        return function

    return decorate


@cache
def python_passes() -> dict[str, PassFunction]:
    """Every registered pass by name, from all files of this folder."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    return _PASSES
