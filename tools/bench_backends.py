"""The ways to run a model that `flambeau bench` compares: one row each."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

Call = Callable[..., Any]


@dataclass
class Notes:
    """What a backend tells of its compilation: seconds by stage, and what it left to eager."""

    stages: dict[str, float] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)


Backend = Callable[[nn.Module, Sequence[Any], Mapping[str, Any], Notes], Call]


def _eager(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], notes: Notes) -> Call:
    return module


def _torch_compile(**settings: Any) -> Backend:
    def compile_(
        module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], notes: Notes
    ) -> Call:
        return torch.compile(module, **settings)

    return compile_


def _flambeau(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], notes: Notes
) -> Call:
    import flambeau

    with _timed(notes.stages):
        compiled = flambeau.compile_module(module, args, kwargs)
    notes.fallbacks += map(str, compiled.fallbacks)
    return compiled


def _flambeau_dynamo(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], notes: Notes
) -> Call:
    from flambeau.errors import FallbackWarning

    function: Call = torch.compile(module, backend="flambeau")
    with _timed(notes.stages), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FallbackWarning)
        function(*args, **kwargs)
    for warning in caught:
        if issubclass(warning.category, FallbackWarning):
            headline, *listing = str(warning.message).splitlines()
            notes.fallbacks += listing or [headline]
    return function


BACKENDS: dict[str, Backend] = {
    "eager": _eager,
    "inductor": _torch_compile(backend="inductor"),
    "inductor-freezing": _torch_compile(backend="inductor", options={"freezing": True}),
    "flambeau": _flambeau,
    "flambeau-dynamo": _flambeau_dynamo,
}

# Where the package looks each stage up when it runs it.
_STAGES = (
    ("capture", "flambeau.frontend.module", "trace"),
    ("capture", "flambeau.frontend.module", "capture"),
    ("capture", "flambeau.frontend.backend", "capture"),
    ("import", "flambeau.frontend.compile", "import_graph"),
    ("lowering", "flambeau.passes.manager", "run_guarded"),
    ("iree", "flambeau.runtime.compiler", "compile_bytecode"),
)


@contextmanager
def _timed(seconds: dict[str, float]) -> Iterator[None]:
    """Adds the seconds that Flambeau spends in each stage."""

    def timed(stage: str, function: Call) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start

        return call

    with ExitStack() as stack:
        for stage, path, name in _STAGES:
            module = importlib.import_module(path)
            patched = patch.object(module, name, timed(stage, getattr(module, name)))
            stack.enter_context(patched)
        yield
