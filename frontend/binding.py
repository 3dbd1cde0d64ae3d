"""Weights of a compiled part: bound once, bound again when one has changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Session = Callable[[Sequence[Any], int], list[Any]]
Bind = Callable[[dict[str, Any], int], Session]

_SESSIONS_KEPT = 64
"""Blocks of one model may share a compiled graph, each with weights of its own."""


class StateChanged(Exception):
    """A weight has another dtype or shape than the program was compiled for."""


def flat_bytes(tensor: torch.Tensor) -> Any:
    """The tensor's bytes in row-major order, without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def version(tensor: torch.Tensor) -> int:
    """Counts writes in place (but not those through `.data`); inference tensors don't count."""
    return -1 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class _Bound:
    """A session with the weights that it is bound to, as they were then."""

    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    pointers: tuple[int, ...]
    threads: int
    session: Session

    def is_current(self, tensors: Sequence[torch.Tensor], threads: int) -> bool:
        if threads != self.threads:
            return False
        for tensor, bound, pointer in zip(tensors, self.tensors, self.pointers, strict=True):
            if tensor is not bound or tensor.data_ptr() != pointer:
                return False
        return self._versions(tensors) == self.versions

    @staticmethod
    def _versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        try:
            return tuple([tensor._version for tensor in tensors])
        except RuntimeError:
            return tuple(map(version, tensors))


class Weights:
    """Sessions of one program, by the weights they are bound to.

    `specs` are the dtype and shape that each weight has to have.
    """

    def __init__(self, bind: Bind, keys: Sequence[str], specs: Sequence[tuple[Any, ...]]):
        self._bind = bind
        self._keys = keys
        self._specs = specs
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[int, ...], _Bound] = OrderedDict()
        self._last: _Bound | None = None

    def session(self, tensors: Sequence[torch.Tensor], threads: int) -> Session:
        """The session for these weights as they are now."""
        last = self._last
        if last is not None and last.is_current(tensors, threads):
            return last.session
        with self._lock:
            return self._find(tensors, threads)

    def _find(self, tensors: Sequence[torch.Tensor], threads: int) -> Session:
        identity = (threads, *map(id, tensors))
        bound = self._known.get(identity)
        if bound is None or not bound.is_current(tensors, threads):
            bound = self._known[identity] = self._new(tensors, threads)
            while len(self._known) > _SESSIONS_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(identity)
        self._last = bound
        return bound.session

    def _new(self, tensors: Sequence[torch.Tensor], threads: int) -> _Bound:
        for key, tensor, spec in zip(self._keys, tensors, self._specs, strict=True):
            if (tensor.dtype, *tensor.shape) != spec:
                raise StateChanged(key)
        versions = tuple(map(version, tensors))
        pointers = tuple(tensor.data_ptr() for tensor in tensors)
        views = dict(zip(self._keys, map(flat_bytes, tensors), strict=True))
        return _Bound(tuple(tensors), versions, pointers, threads, self._bind(views, threads))

    def forget(self) -> None:
        """Bind again at the next call, whatever the weights look like."""
        with self._lock:
            self._known.clear()
            self._last = None
