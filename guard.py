"""Runs native compilers in helper processes, where a crash or a hang becomes an exception.

A helper lives on between calls (starting one costs as much as a small compilation) and ends with
its parent. Functions go by reference and must be importable; arguments and results are pickled
between a process and its own child, nothing else.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class HelperDied(Exception):
    """The helper crashed (`signal` names how) or overran its time limit (`timed_out`)."""

    def __init__(self, returncode: int, stderr: str, timed_out: bool):
        self.signal = signal.Signals(-returncode).name if returncode < 0 else f"exit {returncode}"
        self.stderr = stderr
        self.timed_out = timed_out
        super().__init__("ran out of time" if timed_out else f"crashed with {self.signal}")


class _Helper:
    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the helper
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )

    def call(self, function: Callable[..., T], args: tuple[Any, ...], timeout: float) -> T:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        start = self._stderr.seek(0, os.SEEK_END)
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(timeout, stop)
        timer.daemon = True
        timer.start()
        try:
            pickle.dump((function, args), process.stdin)
            process.stdin.flush()
            failed, result = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            code = process.wait()
            self._stderr.seek(start)
            text = self._stderr.read().decode(errors="replace")
            raise HelperDied(code, text, expired.is_set()) from None
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
        if failed:
            raise result
        return result

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stderr.close()


class _Pool:
    def __init__(self) -> None:
        self._idle: list[_Helper] = []
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # A forked child must not talk to its parent's helpers.
        self._idle, self._lock = [], threading.Lock()

    def call(self, function: Callable[..., T], args: tuple[Any, ...], timeout: float) -> T:
        with self._lock:
            helper = self._idle.pop() if self._idle else None
        if helper is None or not helper.alive:
            helper = _Helper()
        try:
            return helper.call(function, args, timeout)
        finally:
            with self._lock:
                keep = helper.alive and len(self._idle) < (os.cpu_count() or 1)
                if keep:
                    self._idle.append(helper)
            if not keep:
                helper.close()


_pool = _Pool()


def call(function: Callable[..., T], *args: Any, timeout: float) -> T:
    """Call an importable function in a helper process and return its result.

    Raises what the function raises, or HelperDied when it took the process down or needed more
    than `timeout` seconds.
    """
    return _pool.call(function, args, timeout)


def _serve() -> None:
    requests = sys.stdin.buffer
    # Native code may print: what was stdout belongs to the protocol, so point fd 1 at stderr.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            function, args = pickle.load(requests)
            try:
                reply = pickle.dumps((False, function(*args)))
            except Exception as error:
                reply = pickle.dumps((True, error))
            replies.write(reply)
            replies.flush()


if __name__ == "__main__":
    _serve()
