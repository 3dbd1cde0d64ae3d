"""Compares compiled programs with eager PyTorch: values, dtypes, shapes, strides, memory, mutation.

Values are held against eager PyTorch in float64: at most twice the error that eager has in the
program's own type, three times for half types.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import flambeau
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ROUTES = ("compile_module", "torch.compile")

_HALF = (torch.float16, torch.bfloat16)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def as_module(program: Callable[..., Any]) -> nn.Module:
    """The program itself if it is a module, else a module that calls it."""
    return program if isinstance(program, nn.Module) else Function(program)


def build(
    program: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    route: str = "compile_module",
    strict: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """The program compiled by one of the two routes; example arguments are copied first."""
    module = as_module(program)
    if route == "torch.compile":
        return torch.compile(module, backend="flambeau", options={"strict": strict}, **options)
    example, named = copy.deepcopy((tuple(args), dict(kwargs or {})))
    return flambeau.compile_module(module, example, named, strict=strict, **options)


def to_double(tree: Any) -> Any:
    """A copy of a tree of arguments with float64 for every float type, complex128 for complex."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        wide = leaf.detach().clone()
        if leaf.is_floating_point():
            wide = wide.double()
        elif leaf.is_complex():
            wide = wide.to(torch.complex128)
        return wide.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(convert, tree)


def in_double(program: Callable[..., Any], args: Any, kwargs: Any = None) -> tuple[Any, Any]:
    """What a copy of the program returns in eager float64, and its arguments afterwards."""
    module = copy.deepcopy(as_module(program)).double()
    args, kwargs = to_double((tuple(args), dict(kwargs or {})))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return module(*args, **kwargs), (args, kwargs)
    finally:
        torch.set_default_dtype(default)


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def assert_values(found: Tensor, eager: Tensor, exact: Tensor, name: str = "output") -> None:
    """Within k times eager's error against the exact values; integers and NaN alike."""
    if not (eager.is_floating_point() or eager.is_complex()):
        assert torch.equal(found, eager), f"{name}: {found} instead of {eager}"
        return
    dtype = _real(eager).dtype
    found, eager, exact = (_real(t).double() for t in (found, eager, exact))
    odd = ~eager.isfinite()
    assert torch.equal(
        found.nan_to_num(7.0, 8.0, 9.0)[odd], eager.nan_to_num(7.0, 8.0, 9.0)[odd]
    ), f"{name}: {found} where eager has {eager}"
    assert torch.equal(~found.isfinite(), odd), f"{name}: {found} where eager has {eager}"
    found, eager, exact = found[~odd], eager[~odd], exact[~odd]
    if not found.numel():
        return
    scale = exact.abs().max().item()
    error, own = ((t - exact).abs().max().item() for t in (found, eager))
    slack = (64 if dtype is torch.float64 else 4) * torch.finfo(dtype).eps * scale
    allowed = (3 if dtype in _HALF else 2) * own + slack
    assert error <= allowed, f"{name}: error {error:.3g}, eager's {own:.3g}, at most {allowed:.3g}"


def assert_same_metadata(found: Any, eager: Any, name: str = "output") -> None:
    """Equal type, and of tensors dtype, shape, strides and whether they require gradients."""
    assert isinstance(found, Tensor) == isinstance(eager, Tensor), f"{name}: {found!r}"
    if not isinstance(eager, Tensor):
        assert type(found) is type(eager), f"{name}: {found!r} instead of {eager!r}"
        assert found == eager, f"{name}: {found!r} instead of {eager!r}"
        return
    for what in ("dtype", "shape", "requires_grad", "device"):
        got, wanted = getattr(found, what), getattr(eager, what)
        assert got == wanted, f"{name}: {what} {got} instead of {wanted}"
    assert found.stride() == eager.stride(), f"{name}: {found.stride()}, not {eager.stride()}"


def assert_same_tree(found: Any, eager: Any, exact: Any, name: str = "output") -> None:
    """Equal structure, metadata and values, leaf by leaf."""
    leaves, spec = pytree.tree_flatten(found)
    expected, expected_spec = pytree.tree_flatten(eager)
    assert spec == expected_spec
    reference = pytree.tree_leaves(exact)
    for i, (leaf, wanted, precise) in enumerate(zip(leaves, expected, reference, strict=True)):
        assert_same_metadata(leaf, wanted, f"{name} {i}")
        if isinstance(wanted, Tensor):
            assert_values(leaf, wanted, precise, f"{name} {i}")


def _extent(tensor: Tensor) -> range:
    """The addresses of the first and behind the last byte of a tensor's elements."""
    if not tensor.numel():
        return range(0)
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((extent - 1) * stride for extent, stride in sizes)
    start = tensor.data_ptr()
    return range(start, start + reach * tensor.element_size())


def sharing(*trees: Any) -> set[tuple[int, int]]:
    """Which pairs of all these tensors overlap in memory, by position."""
    extents = [_extent(leaf) for leaf in pytree.tree_leaves(trees) if isinstance(leaf, Tensor)]
    pairs = itertools.combinations(range(len(extents)), 2)
    return {
        (i, j)
        for i, j in pairs
        if max(extents[i].start, extents[j].start) < min(extents[i].stop, extents[j].stop)
    }


def snapshot(tree: Any) -> Any:
    """A detached copy of every tensor."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), tree)


def assert_equal_bits(found: Any, expected: Any) -> None:
    """The same numbers in the same dtypes and shapes; NaN equals itself."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    for a, b in pairs:
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b


def assert_like_eager(
    compiled: Callable[..., Any],
    program: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    exact: bool = False,
) -> Any:
    """Call both with copies of the arguments, twice, and compare all that a caller can see.

    With `exact` the outputs have to have eager's very bits. Returns the outputs of the first call.
    """
    given = (tuple(args), dict(kwargs or {}))
    module = as_module(program)
    twin, theirs = copy.deepcopy((module, given))
    eager = twin(*theirs[0], **theirs[1])
    precise, precise_given = (eager, theirs) if exact else in_double(module, *given)
    ours = copy.deepcopy(given)
    found = compiled(*ours[0], **ours[1])
    assert_same_tree(found, eager, precise)
    assert_same_tree(ours, theirs, precise_given, "argument")
    weights = list(module.state_dict().values()), list(twin.state_dict().values())
    assert sharing(found, ours, weights[0]) == sharing(eager, theirs, weights[1])
    kept = snapshot(found)
    again = copy.deepcopy(given)
    compiled(*again[0], **again[1])
    assert_equal_bits(snapshot(found), kept)
    return found


def check(
    program: Callable[..., Any],
    *args: Any,
    route: str = "compile_module",
    strict: bool = False,
    exact: bool = False,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Compile without gradients and compare with eager; returns what was compiled."""
    with torch.no_grad():
        compiled = build(program, args, kwargs, route, strict, **options)
        assert_like_eager(compiled, program, args, kwargs, exact)
    return compiled


def gradients(program: Callable[..., Any], module: nn.Module, args: Sequence[Any]) -> list[Tensor]:
    """Gradients of the sum of squares of all float outputs, of arguments and parameters."""
    outputs = [
        o
        for o in pytree.tree_leaves(program(*args))
        if isinstance(o, Tensor) and o.is_floating_point()
    ]
    loss = sum((o * o).sum() for o in outputs)
    given = [a for a in pytree.tree_leaves(list(args)) if isinstance(a, Tensor)]
    wanted = [t for t in (*given, *module.parameters()) if t.requires_grad]
    return list(torch.autograd.grad(loss, wanted))


def check_gradients(
    program: Callable[..., Any], *args: Any, route: str = "compile_module"
) -> Callable[..., Any]:
    """Compile with gradients and hold those against eager's."""
    module = as_module(program)
    twin, theirs = copy.deepcopy((module, args))
    eager = gradients(twin, twin, theirs)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    wide = copy.deepcopy(module).double()
    exact = gradients(wide, wide, to_double(args))
    torch.set_default_dtype(default)
    compiled = build(module, args, route=route)
    found = gradients(compiled, module, args)
    assert_same_tree(found, eager, exact, "gradient")
    return compiled


_ALLOWED = {
    # These move or name memory and compute nothing.
    f"aten::{name}"
    for name in [
        "alias",
        "as_strided",
        "clone",
        "copy_",
        "detach",
        "empty",
        "empty_strided",
        "empty_like",
        "lift_fresh",
        "permute",
        "select",
        "slice",
        "t",
        "transpose",
        "unsqueeze",
        "view",
        "expand",
        "set_",
        "_reshape_alias",
        "view_as",
        "is_pinned",
    ]
}


class ComputeOps(TorchDispatchMode):
    """Records the ops that eager PyTorch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile call what it has compiled, rather than skip it under a mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the op and run it."""
        if func._schema.name not in _ALLOWED:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def computed_in_eager(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """The ops that eager PyTorch computes while `compiled` is called; it has to be warm."""
    with torch.no_grad(), ComputeOps() as ops:
        compiled(*args, **kwargs)
    return ops.seen
