"""Weights of a compiled part: bound once, bound again when one has changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Session = Callable[[Sequence[Any]], list[Any]]
Bind = Callable[[dict[str, Any], int], Session]

_SESSIONS_KEPT = 64
"""Blocks of one model may share a compiled graph, each with weights of its own."""


class StateChanged(Exception):
    """A weight has another dtype or shape than the program was compiled for."""


@dataclass(frozen=True)
class Weight:
    """An input of a part that is a weight: its position, the program's key for it, its type."""

    position: int
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def bytes(self, tensor: torch.Tensor) -> Any:
        """The tensor's bytes in row-major order, without a copy where it is contiguous."""
        if tensor.dtype is not self.dtype or tuple(tensor.shape) != self.shape:
            raise StateChanged(self.key)
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


@dataclass(frozen=True)
class Bound:
    """A session with the weights it is bound to, as they were then.

    `seen` holds for each weight its position, the tensor, its address and its version. The
    version counts writes in place, but not those through `.data`; inference tensors have none.
    """

    session: Session
    threads: int
    seen: tuple[tuple[int, torch.Tensor, int, int | None], ...]

    def is_current(self, inputs: Sequence[Any], threads: int) -> bool:
        """Whether these inputs have the same weights, unchanged."""
        return threads == self.threads and all(
            inputs[position] is tensor
            and tensor.data_ptr() == address
            and (version is None or tensor._version == version)
            for position, tensor, address, version in self.seen
        )


class Weights:
    """Sessions of one program, by the weights they are bound to."""

    def __init__(self, bind: Bind, weights: Sequence[Weight]):
        self._bind = bind
        self._weights = weights
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[int, ...], Bound] = OrderedDict()
        self.last: Bound | None = None

    def bound(self, inputs: Sequence[Any], threads: int) -> Bound:
        """The session for the weights among these inputs as they are now."""
        with self._lock:
            identity = (threads, *(id(inputs[weight.position]) for weight in self._weights))
            bound = self._known.get(identity)
            if bound is None or not bound.is_current(inputs, threads):
                bound = self._known[identity] = self._new(inputs, threads)
                while len(self._known) > _SESSIONS_KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(identity)
            self.last = bound
            return bound

    def _new(self, inputs: Sequence[Any], threads: int) -> Bound:
        seen = []
        for weight in self._weights:
            tensor = inputs[weight.position]
            version = None if tensor.is_inference() else tensor._version
            seen.append((weight.position, tensor, tensor.data_ptr(), version))
        views = {weight.key: weight.bytes(inputs[weight.position]) for weight in self._weights}
        return Bound(self._bind(views, threads), threads, tuple(seen))

    def forget(self) -> None:
        """Bind again at the next call, whatever the weights look like."""
        with self._lock:
            self._known.clear()
            self.last = None
