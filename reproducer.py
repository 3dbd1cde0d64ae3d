"""Writes a failed compilation down as one file that replays it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from . import guard
from .config import config


def write_reproducer(bytecode: bytes, to_text: Callable[[bytes], str], command: str) -> Path:
    """Write the module as text, or as bytecode where it can't be printed, with a command.

    `to_text` runs in a helper process. FILE in `command` stands for the path.
    """
    folder = config.reproducer_dir or Path(tempfile.gettempdir()) / "flambeau-reproducers"
    folder.mkdir(parents=True, exist_ok=True)
    stem = hashlib.sha256(bytecode + command.encode()).hexdigest()[:16]
    try:
        text = guard.call(to_text, bytecode, timeout=60)
    except (guard.HelperDied, ValueError):
        path = folder / f"{stem}.mlirbc"
        path.write_bytes(bytecode)
        path.with_suffix(".sh").write_text(command.replace("FILE", str(path)) + "\n")
        return path
    path = folder / f"{stem}.mlir"
    path.write_text(f"// Replay: {command.replace('FILE', str(path))}\n{text}\n")
    return path
