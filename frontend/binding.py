"""Weights of a compiled part: bound once, bound again when one has changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

Session = Callable[[Sequence[Any], int], list[Any]]
Bind = Callable[[dict[str, Any], int], Session]

_SESSIONS_KEPT = 64
"""Blocks of one model may share a compiled graph, each with weights of its own."""


class StateChanged(Exception):
    """A weight has another dtype or shape than the program was compiled for."""


def stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes when a tensor is written in place (but not through `.data`) or gets other storage."""
    version = -1 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr()


def flat_bytes(tensor: torch.Tensor) -> Any:
    """The tensor's bytes in row-major order, without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


class Weights:
    """Sessions of one program, by the weights they are bound to."""

    def __init__(self, bind: Bind, keys: Sequence[str], specs: Sequence[tuple[Any, ...]]):
        self._bind = bind
        self._keys = keys
        self._specs = specs
        self._lock = threading.Lock()
        self._sessions: OrderedDict[tuple[Any, ...], tuple[Any, Any, Session]] = OrderedDict()
        self._current: tuple[Any, Any, int, Session | None] = ((), (), -1, None)

    def session(self, tensors: Sequence[torch.Tensor], threads: int) -> Session:
        """The session for these weights as they are now."""
        bound, stamps, count, session = self._current
        if session is not None and count == threads and _same(tensors, bound, stamps):
            return session
        with self._lock:
            return self._find(tensors, threads)

    def _find(self, tensors: Sequence[torch.Tensor], threads: int) -> Session:
        identity = (threads, *map(id, tensors))
        bound, stamps, session = self._sessions.get(identity, ((), (), None))
        if session is None or not _same(tensors, bound, stamps):
            for key, tensor, spec in zip(self._keys, tensors, self._specs, strict=True):
                if (tensor.dtype, *tensor.shape) != spec:
                    raise StateChanged(key)
            bound, stamps = tuple(tensors), tuple(map(stamp, tensors))
            views = dict(zip(self._keys, map(flat_bytes, tensors), strict=True))
            session = self._bind(views, threads)
            self._sessions[identity] = (bound, stamps, session)
            while len(self._sessions) > _SESSIONS_KEPT:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(identity)
        self._current = (bound, stamps, threads, session)
        return session

    def forget(self) -> None:
        """Bind again at the next call, whatever the weights look like."""
        with self._lock:
            self._sessions.clear()
            self._current = ((), (), -1, None)


def _same(tensors: Sequence[Any], bound: Sequence[Any], stamps: Sequence[Any]) -> bool:
    if len(bound) != len(tensors):
        return False
    for tensor, other, seen in zip(tensors, bound, stamps, strict=True):
        if tensor is not other or stamp(tensor) != seen:
            return False
    return True
