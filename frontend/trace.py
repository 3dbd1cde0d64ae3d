"""Asks Dynamo for the one graph of a module, for compile_module."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._dynamo.convert_frame import fullgraph_capture
from torch._dynamo.functional_export import (
    DynamoGraphTransformer,
    ModuleToTrace,
    _suggest_or_raise_constraint_violation,
)
from torch._dynamo.source import GetItemSource
from torch._dynamo.utils import get_metrics_context
from torch._export.utils import _compiling_state_context
from torch.export._trace import _combine_args
from torch.export.dynamic_shapes import (
    _check_dynamic_shapes,
    _IntWrapper,
    _process_dynamic_shapes,
)

from ..errors import CaptureError

_lock = threading.Lock()


@dataclass(frozen=True)
class Traced:
    """Dynamo's graph over the flattened arguments, and how to put its outputs together."""

    graph: fx.GraphModule
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    names: Mapping[int, str]


def argument_names(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """What the user calls each leaf of the arguments: `x`, `cache[0]`."""
    try:
        combined = _combine_args(module, tuple(args), dict(kwargs))
    except TypeError:
        combined = {f"args[{i}]": a for i, a in enumerate(args)} | dict(kwargs)
    leaves, _ = pytree.tree_flatten_with_path(combined)
    return [path[0].key + pytree.keystr(path[1:]) for path, _ in leaves]


def trace(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> Traced:
    """One graph of the whole module, under grad mode, so that `no_grad` regions stay visible.

    Raises CaptureError, with Dynamo's reason and the user's line, for what isn't one graph.
    """
    with _lock, torch.inference_mode(False), torch.enable_grad():
        try:
            return _trace(module, tuple(args), dict(kwargs), dynamic_shapes)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise CaptureError(_broken(module, error)) from error
        except Exception as error:
            name = type(module).__name__
            if not _is_from_capture(error):
                raise
            raise CaptureError(f"{name} could not be captured: {error}") from error


def _is_from_capture(error: Exception) -> bool:
    """Whether torch's capture refuses, rather than the user's own code having failed."""
    return type(error).__module__.startswith("torch.") or isinstance(error, AssertionError)


def _broken(module: nn.Module, error: Exception) -> str:
    return (
        f"{type(module).__name__} is not one graph:\n{error}\n"
        "compile_module needs the whole model in one graph. Remove the break at the line above, "
        'or use torch.compile(model, backend="flambeau"), which compiles the parts around it.'
    )


def _trace(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> Traced:
    names = dict(enumerate(argument_names(module, args, kwargs)))
    if dynamic_shapes:
        args, kwargs = pytree.tree_map_only(int, _IntWrapper, (args, kwargs))
    flat, in_spec = pytree.tree_flatten((args, kwargs))
    flat = _distinct(flat)
    args, kwargs = pytree.tree_unflatten(flat, in_spec)
    combined = _combine_args(module, args, kwargs)
    _check_dynamic_shapes(combined, dynamic_shapes)
    constraints = _process_dynamic_shapes(combined, dynamic_shapes)
    settings = torch._dynamo.config.patch(
        specialize_int=True,
        specialize_float=True,
        assume_static_by_default=True,
        automatic_dynamic_shapes=False,
        capture_dynamic_output_shape_ops=True,
        capture_scalar_outputs=True,
        log_graph_in_out_metadata=True,
        install_free_tensors=True,
    )
    with _compiling_state_context(), get_metrics_context(), settings:
        captured = fullgraph_capture(
            ModuleToTrace(module, in_spec),
            tuple(flat),
            constraints=constraints,
            _is_export_deprecated_do_not_use=True,
        )
        output_graph = captured.graph_capture_output.output_graph
        backend = captured.backend_input
        if backend is None:
            graph = fx.GraphModule(nn.Module(), fx.Graph())
            graph.graph.output(())
            fake_mode, examples = None, []
        else:
            graph, fake_mode = backend.graph_module, backend.fake_mode
            examples = list(backend.example_inputs)
        if dynamic_shapes:
            _suggest_or_raise_constraint_violation(
                ModuleToTrace(module, in_spec),
                module.forward,
                fake_mode,
                captured,
                args,
                kwargs,
                dynamic_shapes,
            )
    metadata = output_graph.export_metadata
    sources = metadata.graph_input_idx_to_local_source
    order: dict[int, int] = {}
    for source in sources.values():
        if isinstance(source, GetItemSource):
            order[source.index] = len(order)
    for position, index in order.items():
        flat[position] = examples[index]
    # The transformer reads dynamic dims only for real tensors; Dynamo has replaced those.
    static: list[set[int]] = [set() for _ in flat]
    transformer = DynamoGraphTransformer(
        graph, flat, static, order, metadata.output_return_type, None, sources
    )
    return Traced(transformer.transform(), in_spec, metadata.out_spec, names)


def _distinct(leaves: list[Any]) -> list[Any]:
    """Dynamo makes one argument of a tensor given twice; other calls may give two."""
    seen: set[int] = set()
    distinct = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) in seen:
            copy = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
            leaf = copy.requires_grad_(leaf.requires_grad)
        seen.add(id(leaf))
        distinct.append(leaf)
    return distinct


def bind_to(
    forward: inspect.Signature, like: tuple[Sequence[Any], Mapping[str, Any]], call: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, passed by position and by name as in the example arguments.

    Raises TypeError where the call gives other arguments than the example did.
    """
    given = _by_name(forward.bind(*call[0], **call[1]))
    expected = _by_name(forward.bind(*like[0], **like[1]))
    for name in given.keys() - expected.keys():
        default = _default(forward, name)
        if given[name] is not default and not _equal_constants(given[name], default):
            raise TypeError(f"argument {name!r} was not given when the module was compiled")
    for name in expected.keys() - given.keys():
        given[name] = _default(forward, name)
        if given[name] is inspect.Parameter.empty:
            raise TypeError(f"missing argument {name!r}")
    positional = [given[name] for name in list(expected)[: len(like[0])]]
    return tuple(positional), {name: given[name] for name in like[1]}


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Every argument by name, those of `*args` by number."""
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named |= {f"*{name}[{i}]": element for i, element in enumerate(value)}
        else:
            named[name] = value
    return named


def _default(forward: inspect.Signature, name: str) -> Any:
    parameter = forward.parameters.get(name)
    return inspect.Parameter.empty if parameter is None else parameter.default


def _equal_constants(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b
