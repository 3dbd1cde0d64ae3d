"""Where a module keeps its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn


@dataclass(frozen=True)
class Slot:
    """A tensor's place: looked up at each call, so a replaced weight is seen."""

    name: str
    kind: Literal["parameter", "buffer", "constant"]
    persistent: bool
    holder: dict[str, Any]
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        return self.holder[self.key]


def state_slots(module: nn.Module) -> dict[int, Slot]:
    """The slot of each tensor of a module by the tensor's id, the first one of shared tensors."""
    slots: dict[int, Slot] = {}

    def add(tensor: Any, name: str, kind: Any, persistent: bool, holder: dict[str, Any]) -> None:
        if isinstance(tensor, torch.Tensor):
            slot = Slot(name, kind, persistent, holder, name.rpartition(".")[2])
            slots.setdefault(id(tensor), slot)

    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for key, value in owner._parameters.items():
            add(value, dot + key, "parameter", True, owner._parameters)
        for key, value in owner._buffers.items():
            persistent = key not in owner._non_persistent_buffers_set
            add(value, dot + key, "buffer", persistent, owner._buffers)
        for key, value in owner.__dict__.items():
            add(value, dot + key, "constant", False, owner.__dict__)
    return slots
