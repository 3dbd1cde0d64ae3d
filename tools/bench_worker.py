"""The process in which `flambeau bench` runs one backend on one model.

Requests come as lines of JSON on stdin and name a method of `_Worker`; replies go to stdout.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import signal
import sys
import time
import traceback
from typing import Any

import torch

from .accuracy import error, reference
from .bench_backends import BACKENDS, Notes
from .models import MODELS, check_activations

SHORTEST_SAMPLE = 0.002
"""Seconds; calls that are faster are timed several at a time."""


class _Worker:
    def reference(self, model: str, size: str, file: str) -> dict[str, Any]:
        """Write the float64 results to a file; say how far eager float32 is from them."""
        module, args, kwargs = MODELS[model].build(size)
        with torch.no_grad():
            outputs = module(*args, **kwargs)
        check_activations(outputs)
        expected = reference(module, args, kwargs)
        torch.save(expected, file)
        inputs = [*enumerate(args), *kwargs.items()]
        return {
            "error": error(outputs, expected),
            "inputs": {str(name): _describe(value) for name, value in inputs},
            "parameters": sum(p.numel() for p in module.parameters()),
            "threads": torch.get_num_threads(),
        }

    def compile(self, backend: str, model: str, size: str, file: str) -> dict[str, Any]:
        """Compile and call once, then compare with the results in the file."""
        module, args, kwargs = MODELS[model].build(size)
        notes = Notes()
        start = time.perf_counter()
        with torch.no_grad():
            function = BACKENDS[backend](module, args, kwargs, notes)
            compiled = time.perf_counter()
            outputs = function(*args, **kwargs)
            called = time.perf_counter()
        self._function = function
        self._run = lambda: function(*args, **kwargs)
        notes.stages["first call"] = called - compiled
        return {
            "compile_s": called - start,
            "stages_s": notes.stages,
            "fallbacks": notes.fallbacks,
            "error": error(outputs, torch.load(file, weights_only=True)),
        }

    def ir(self, stage: str, lines: int) -> dict[str, Any]:
        """The first lines of what CompiledModule.ir gives."""
        function: Any = self._function
        text: str = function.ir(stage)
        return {"lines": text.splitlines()[:lines]}

    @torch.no_grad()
    def measure(self, seconds: float, least: int) -> dict[str, Any]:
        """Seconds of single calls: samples for about so long, and at least so many."""
        run = self._run
        run()
        start = time.perf_counter()
        run()
        calls = max(1, math.ceil(SHORTEST_SAMPLE / (time.perf_counter() - start)))
        samples: list[float] = []
        gc.collect()
        gc.disable()
        begin = time.perf_counter()
        while len(samples) < least or time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            for _ in range(calls):
                run()
            samples.append((time.perf_counter() - start) / calls)
        gc.enable()
        return {"samples_s": samples}


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _failure(problem: Exception) -> dict[str, Any]:
    text = str(problem).strip()
    reason = f"{type(problem).__name__}: {text.splitlines()[0] if text else ''}".rstrip(": ")
    return {"reason": reason, "traceback": traceback.format_exc()}


def _end_with_parent() -> None:
    # A stopped process would not notice that its pipe has been closed.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


def main() -> None:
    """Answer requests until stdin ends."""
    _end_with_parent()
    # Compilers print: what was stdout belongs to the replies, so point fd 1 at stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    worker = _Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(worker, request.pop("do"))(**request)
        except Exception as problem:
            reply = _failure(problem)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
