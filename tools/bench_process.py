"""A worker of `flambeau bench`, stopped whenever it has nothing to do.

Idle thread pools spin: a process that merely waits would slow down the one being measured.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WorkerFailed(Exception):
    """A request failed: `reason` in one line, `details` in full."""

    def __init__(self, reason: str, details: str):
        super().__init__(reason)
        self.reason = reason
        self.details = details


class Worker:
    """A process and group of its own, with a fresh folder. Use it as a context manager."""

    def __init__(self, root: str, name: str, threads: int | None):
        folder = Path(root, name)
        folder.mkdir()
        self._log_file = folder / "stderr"
        with self._log_file.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.bench_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=folder,
                env=os.environ | _environment(folder, threads),
                start_new_session=True,
            )

    def ask(self, do: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        """Have the worker do something while all others are stopped. Raises WorkerFailed."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], timeout)[0]:
                raise WorkerFailed(f"ran out of time in {do}, after {timeout:g} s", self._log())
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise WorkerFailed(self._death(process.wait()), self._log())
        self._signal(signal.SIGSTOP)
        reply: dict[str, Any] = json.loads(line)
        if "reason" in reply:
            raise WorkerFailed(reply["reason"], reply["traceback"])
        return reply

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _death(self, code: int) -> str:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        lines = self._log().strip().splitlines()
        return f"the process ended with {how}" + (f": {lines[-1]}" if lines else "")

    def _log(self) -> str:
        return self._log_file.read_text(errors="replace")[-10_000:]

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _environment(folder: Path, threads: int | None) -> Mapping[str, str]:
    """Compilers start cold, and nothing is looked up on a network."""
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if threads is not None:
        settings |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return settings
