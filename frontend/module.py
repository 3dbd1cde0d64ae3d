"""CompiledModule: a module whose forward runs compiled."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..errors import InputError
from ..passes.manager import to_text
from . import layout
from .autograd import Call, Differentiable, requires_grad
from .binding import StateChanged
from .capture import capture
from .checks import Check
from .compile import Build, Fallback, compile_graph
from .signature import Signature
from .state import Slot, state_slots
from .trace import Traced, argument_names, bind_to, trace


def autocast_state() -> torch.dtype | None:
    """The type that autocast makes of float32 now; None outside of it."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


class _Variant:
    """The module compiled for one training state and one memory layout of its arguments."""

    def __init__(
        self, module: nn.Module, traced: Traced, build: Build, strict: bool, recover: bool
    ):
        slots = state_slots(module)
        self.compiled = compile_graph(
            lambda expanded: capture(traced.graph, expanded, names=traced.names, slots=slots),
            build,
            strict,
            recover,
        )
        captured = self.compiled.captured
        self.signature = captured.signature
        self.traced = traced
        tensors = [captured.state[i] for i in sorted(captured.state)]
        held = [slots.get(id(t), Slot("", "constant", False, {"": t}, "")) for t in tensors]
        self._state = [(slot.holder, slot.key) for slot in held]
        self._call: Call = self.compiled.executor
        self._differentiable = Differentiable(self._call, captured, strict)

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Any]:
        arguments = [*leaves, *[holder[key] for holder, key in self._state]]
        if torch.is_grad_enabled() and any(map(requires_grad, arguments)):
            return self._differentiable(arguments)
        return self._call(arguments)


class CompiledModule(nn.Module):
    """A module compiled by `flambeau.compile_module`.

    It shares parameters, buffers and submodules with the module it was made from: `state_dict`,
    `load_state_dict`, `parameters` and `to` are that module's, and a changed weight counts from
    the next call on. Arguments of another shape, dtype or device than the example's raise
    InputError; sizes named in `dynamic_shapes` may vary. Calling it in another training mode, or
    with arguments in another memory layout, compiles a variant once. With gradients enabled the
    result is differentiable (see `flambeau.frontend.autograd`).
    """

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        dynamic_shapes: Any,
        build: Build,
        strict: bool,
        recover: bool,
    ):
        super().__init__()
        object.__setattr__(self, "_module", module)
        self._options: dict[str, Any] = {"build": build, "strict": strict, "recover": recover}
        self._dynamic_shapes = dynamic_shapes
        self._lock, self._stale = threading.RLock(), False
        self._share()
        self._compile(args, kwargs)

    def _share(self) -> None:
        module = self._module
        self._parameters, self._buffers = module._parameters, module._buffers
        self._modules = module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self._all_modules = list(module.modules())
        self.training = module.training

    def _compile(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Start over: the given arguments are the example from now on."""
        traced = trace(self._module, args, kwargs, self._dynamic_shapes)
        first = _Variant(self._module, traced, **self._options)
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        self._like = pytree.tree_map(lambda _: None, (tuple(args), dict(kwargs)))
        self._in_spec, self._out_spec = traced.in_spec, traced.out_spec
        self._signature = first.signature
        self._checks = [Check(i) for i in first.signature.inputs[: len(traced.names)]]
        only_leaves = pytree.tree_structure(((None,) * len(args), {}))
        self._bare = len(args) if self._in_spec == only_leaves else -1
        self._bare_result = self._out_spec.is_leaf()
        self._aliased = {
            o.index for o in first.signature.outputs if o.kind == "alias" and o.of == "input"
        }
        self._training = [(module, module.training) for module in self._all_modules]
        self._plain_layout = self._layout(leaves)
        self._autocast = autocast_state()
        self._first = first
        self._stale = False
        self._variants = {(self._flags(), autocast_state(), self._plain_layout): first}

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The operators that run in eager, with source line and reason."""
        return self._first.compiled.fallbacks

    @property
    def signature(self) -> Signature:
        """What the module takes and gives back, as plain data."""
        return self._signature

    def ir(self, stage: str = "torch") -> str:
        """The IR of each compiled part as text: "torch" as imported, "lowered" for IREE.

        Raises InputError for another stage.
        """
        parts = self._first.compiled.stages
        known = list(parts[0]) if parts else []
        if parts and stage not in known:
            raise InputError(f"no stage {stage!r}; there are: {', '.join(known)}")
        return "\n".join(to_text(part[stage], debug_info=False) for part in parts)

    def refresh(self) -> None:
        """Read all weights anew at the next call.

        For writes that leave no trace: through `parameter.data`, a NumPy array over the same
        memory, or to inference tensors.
        """
        for variant in self._variants.values():
            variant.compiled.executor.refresh()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, compiled."""
        if self._stale:
            self._compile(args, kwargs)
        if len(args) == self._bare and not kwargs:
            leaves: Sequence[Any] = args
        else:
            leaves = self._flatten(args, kwargs)
        for check, leaf in zip(self._checks, leaves, strict=True):
            if not check.matches(leaf):
                variant = self._other(leaves)
                break
        else:
            variant = self._first
            if autocast_state() != self._autocast:
                variant = self._other(leaves)
            for module, training in self._training:
                if module.training is not training:
                    variant = self._other(leaves)
                    break
        try:
            outputs = variant(leaves)
        except StateChanged:
            self._compile(*pytree.tree_unflatten(leaves, self._in_spec))
            outputs = self._first(leaves)
        return outputs[0] if self._bare_result else pytree.tree_unflatten(outputs, self._out_spec)

    def _flags(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._all_modules)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec == self._in_spec:
            return leaves
        try:
            forward = inspect.signature(self._module.forward)
            leaves, spec = pytree.tree_flatten(bind_to(forward, self._like, (args, kwargs)))
        except TypeError as error:
            raise InputError(f"{type(self._module).__name__}: {error}") from None
        if spec != self._in_spec:
            given = argument_names(self._module, args, kwargs)
            expected = [check.given.name for check in self._checks]
            raise InputError(
                f"{type(self._module).__name__} was compiled for arguments {expected}, got {given}"
            )
        return leaves

    def _other(self, leaves: Sequence[Any]) -> _Variant:
        """The variant for arguments that differ from the example in size, layout or mode."""
        sizes = self._sizes(leaves)
        key: tuple[Any, ...] = (self._flags(), autocast_state(), self._layout(leaves))
        # Captured graphs take it for granted that sizes that vary are at least 2.
        tiny = any(isinstance(size, int) and size < 2 for size in sizes.values())
        if tiny:
            key += tuple(getattr(leaf, "shape", leaf) for leaf in leaves)
        variant = self._variants.get(key)
        if variant is not None:
            return variant
        with self._lock:
            if key not in self._variants:
                args, kwargs = pytree.tree_unflatten(leaves, self._in_spec)
                dynamic = None if tiny else self._dynamic_shapes
                traced = trace(self._module, args, kwargs, dynamic)
                self._variants[key] = _Variant(self._module, traced, **self._options)
            return self._variants[key]

    def _sizes(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The values of the symbols. Raises InputError for arguments that don't fit."""
        for check, leaf in zip(self._checks, leaves, strict=True):
            check.verify_type(leaf)
        sizes: dict[str, Any] = {}
        for symbol in self._signature.symbols:
            if symbol.input < len(leaves):
                value = leaves[symbol.input]
                sizes[symbol.name] = value if symbol.dim is None else value.shape[symbol.dim]
        for check, leaf in zip(self._checks, leaves, strict=True):
            check.verify_sizes(leaf, sizes)
        for symbol in self._signature.symbols:
            self._checks[symbol.input].verify_range(symbol, sizes[symbol.name])
        return sizes

    def _layout(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """What of the arguments' memory layouts can show in the result's."""
        return tuple(
            layout.kind(leaf, exact=i in self._aliased) if isinstance(leaf, torch.Tensor) else None
            for i, leaf in enumerate(leaves)
        )

    def train(self, mode: bool = True) -> CompiledModule:
        """Set the training mode of the module this was made from, too."""
        self._module.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> CompiledModule:
        # `.to(dtype)` and its like: what the next call brings is the new example.
        self._module._apply(fn, recurse)
        self._stale = True
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the module this was made from, under its own names."""
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module this was made from; counts from the next call on."""
        return self._module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_module"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """A compiled module over a copy of the module; it compiles at its first call."""
        twin = CompiledModule.__new__(CompiledModule)
        nn.Module.__init__(twin)
        object.__setattr__(twin, "_module", copy.deepcopy(self._module, memo))
        twin._options, twin._dynamic_shapes = self._options, self._dynamic_shapes
        twin._lock, twin._stale = threading.RLock(), True
        twin._share()
        return twin
