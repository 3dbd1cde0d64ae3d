"""One exception hierarchy: everything Flambeau raises or warns with."""

from __future__ import annotations

from pathlib import Path


class FlambeauError(Exception):
    """Base of every error that Flambeau raises on purpose."""


class CaptureError(FlambeauError):
    """A model could not be captured as one graph; says where it breaks and what to do."""


class InputError(FlambeauError, TypeError, ValueError):
    """An argument that a compiled callable or `compile_module` does not take.

    It is a TypeError and a ValueError too, so code written for eager PyTorch still catches it.
    """


class UnsupportedOp(FlambeauError):
    """Raised under `strict=True`: lists every operator that would have run in eager."""


class _NativeFailure(FlambeauError):
    def __init__(self, message: str, reproducer: Path | None = None, diagnostics: str = ""):
        super().__init__(message, reproducer, diagnostics)
        self.reproducer = reproducer
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        text = self.args[0]
        if self.reproducer is not None:
            text += f"\nReproducer (its first lines say how to replay it): {self.reproducer}"
        return text


class PassFailed(_NativeFailure):
    """A pass over MLIR failed, crashed or ran out of time; `reproducer` replays it."""


class TargetError(_NativeFailure):
    """A target is unknown, cannot run here, or its compiler failed; `reproducer` may replay it."""


class IndexOutOfRange(FlambeauError, IndexError, RuntimeError):
    """An index in a compiled program is out of range; eager raises one of its other bases."""


class ArtifactError(FlambeauError):
    """A saved artifact is damaged, foreign or not meant for this machine."""


class FallbackWarning(UserWarning):
    """Part of a graph runs in eager PyTorch; names the operator, its source line and the reason."""
