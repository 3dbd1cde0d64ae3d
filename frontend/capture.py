"""Dynamo's graph to one functional ATen graph and its Signature.

Both ways in meet here: `torch.compile` hands Dynamo's graph to the backend, `compile_module` asks
Dynamo for one. Dynamo records on each node a fake tensor (`example_value`) whose storage and
strides are eager's; aliases and layouts are read from those.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._functorch.aot_autograd import aot_export_module
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..config import config
from ..errors import CaptureError
from .bounds import add_checks
from .decompositions import TABLE, Decompositions
from .graphs import calls, example_value, placeholders
from .outputs import Outputs
from .reshape import spell_reshapes
from .signature import Input, Signature, Symbol
from .specs import size, tensor_spec
from .state import Slot

aten = torch.ops.aten


@dataclass
class Captured:
    """A functional graph over ATen ops; its placeholders stand in the order of `signature.inputs`.

    `state` holds the tensors of inputs that no caller passes: module state and constants.
    `eager` is Dynamo's graph over the same arguments, without the constants found in tracing.
    """

    module: fx.GraphModule
    signature: Signature
    fake_mode: FakeTensorMode
    state: dict[int, torch.Tensor]
    eager: fx.GraphModule

    def run_eager(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """What eager PyTorch gives for these arguments."""
        return self.eager(*arguments[: len(placeholders(self.eager.graph))])


def capture(
    dynamo_graph: fx.GraphModule,
    expanded: Decompositions | None = None,
    kinds: Mapping[int, str] | None = None,
    names: Mapping[int, str] | None = None,
    slots: Mapping[int, Slot] | None = None,
) -> Captured:
    """The functional graph of a graph of Dynamo's, which stays as it is.

    `expanded` are ops to decompose beside those that always are. `kinds` says which arguments are
    state, `names` what users call them, `slots` where a module keeps a tensor, by its id. Raises
    CaptureError for what has no such graph: tensor subclasses, arguments whose shape or storage
    the graph changes, other devices.
    """
    module = fx.GraphModule(dynamo_graph, _copy(dynamo_graph.graph))
    _drop_inactive_dropout(module.graph)
    state = _lift_tensors(module)
    _lift_floats(module.graph)
    # A GraphModule keeps only what its graph reads: tracing would lift the tensors once more.
    module = fx.GraphModule(module, module.graph)
    eager = fx.GraphModule(module, _copy(module.graph))
    _inline_checkpoints(module.graph)
    arguments = placeholders(module.graph)
    values = [example_value(node) for node in arguments]
    _refuse(values)
    plan = Outputs(arguments, module.graph)
    plan.rewrite(module)
    fake_mode = detect_fake_mode(values) or FakeTensorMode(allow_non_fake_inputs=True)
    functional, mutations = _functionalize(module, values, fake_mode, {**(expanded or {}), **TABLE})
    constants = _lift_tensors(functional)
    for i in constants:
        argument = placeholders(functional.graph)[i]
        argument.meta["val"] = fake_mode.from_tensor(constants[i], static_shapes=True)
    state |= constants
    plan.normalise_layouts(functional.graph, len(mutations), fake_mode)
    _simplify(functional)
    checks = add_checks(functional.graph, fake_mode) if config.check_indices else ()
    spell_reshapes(functional.graph, fake_mode)
    functional.graph.eliminate_dead_code()
    functional.recompile()
    describe = _Describe(state, kinds or {}, names or {}, slots or {})
    inputs = _inputs(module.graph, functional.graph, dict(mutations), describe)
    signature = Signature(
        inputs=inputs,
        outputs=plan.signature(len(mutations)),
        mutations=tuple(mutations),
        symbols=tuple(_symbols(functional.graph, fake_mode)),
        checks=checks,
    )
    return Captured(functional, signature, fake_mode, state, eager)


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    output = copy.graph_copy(graph, {})
    copy.output(output)
    return copy


def _refuse(values: list[Any]) -> None:
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        if is_traceable_wrapper_subclass(value):
            raise CaptureError(f"{type(value).__name__} is a tensor subclass: it runs in eager")
        if value.device.type != "cpu":
            raise CaptureError(f"an argument is on device {value.device}; only cpu is compiled")
        if value.layout != torch.strided or value.is_quantized:
            raise CaptureError(f"an argument has layout {value.layout}, which runs in eager")


def _lift_tensors(module: fx.GraphModule) -> dict[int, torch.Tensor]:
    """Turn tensors that the graph reads from its module into arguments; gives their positions."""
    graph, lifted = module.graph, {}
    arguments: dict[str, fx.Node] = {}
    position = len(placeholders(graph))
    last = placeholders(graph)[-1] if position else None
    for node in graph.find_nodes(op="get_attr"):
        tensor = operator.attrgetter(node.target)(module)
        if not isinstance(tensor, torch.Tensor):
            continue
        if node.target not in arguments:
            first = next(iter(graph.nodes))
            where = graph.inserting_after(last) if last else graph.inserting_before(first)
            with where:
                last = graph.placeholder(node.name)
            last.meta = dict(node.meta)
            if example_value(node) is None:
                last.meta["val"] = tensor
            arguments[node.target] = last
            lifted[position] = tensor
            position += 1
        node.replace_all_uses_with(arguments[node.target])
        graph.erase_node(node)
    module.recompile()
    return lifted


def _lift_floats(graph: fx.Graph) -> None:
    """Make floats of those that Dynamo passes as 0-d tensors and reads by `item()`."""
    for node in graph.find_nodes(op="call_method", target="item"):
        source = node.args[0]
        if source.op == "placeholder" and isinstance(example_value(node), torch.SymFloat):
            source.meta["example_value"] = example_value(node)
            node.replace_all_uses_with(source)
            graph.erase_node(node)


_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
}


def _drop_inactive_dropout(graph: fx.Graph) -> None:
    """Dropout outside of training returns its very argument: an alias that tracing would lose."""
    for node in calls(graph):
        if node.target not in _DROPOUTS:
            continue
        training = node.args[2] if len(node.args) > 2 else None
        if node.kwargs.get("training", node.kwargs.get("train", training)) is False:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _inline_checkpoints(graph: fx.Graph) -> None:
    """A checkpointed region computes what it does without; what to save is decided later."""
    for node in calls(graph):
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body, *arguments = node.args
            with graph.inserting_before(node):
                call = graph.call_module(body.target, tuple(arguments))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.erase_node(node)


def _uses_autocast(graph: fx.Graph) -> bool:
    enter = torch.amp.autocast_mode._enter_autocast
    return torch.is_autocast_enabled("cpu") or bool(
        graph.find_nodes(op="call_function", target=enter)
    )


def _functionalize(
    module: fx.GraphModule,
    values: list[Any],
    fake_mode: FakeTensorMode,
    decompositions: Decompositions,
) -> tuple[fx.GraphModule, list[tuple[int, int]]]:
    """The ATen graph without mutations: new values of mutated arguments first, then results.

    Traced before dispatch, so that composite ops stay whole; under autocast, whose casts come
    later in the dispatcher, after it.
    """
    try:
        with fake_mode, torch.no_grad():
            functional, signature = aot_export_module(
                module,
                tuple(values),
                trace_joint=False,
                pre_dispatch=not _uses_autocast(module.graph),
                decompositions=dict(decompositions),
            )
    except Exception as error:
        raise CaptureError(f"no functional graph: {_reason(error)}") from error
    _drop_tokens(functional.graph, len(signature.input_tokens))
    names = {node.name: i for i, node in enumerate(placeholders(functional.graph))}
    outputs = [getattr(leaf, "name", None) for leaf in functional.graph.output_node().args[0]]
    mutated = signature.user_inputs_to_mutate
    return functional, [(names[mutated[name]], i) for i, name in enumerate(outputs[: len(mutated)])]


def _drop_tokens(graph: fx.Graph, count: int) -> None:
    """Remove the effect tokens that tracing adds in front and that order nothing here."""
    output = graph.output_node()
    output.args = (tuple(output.args[0][count:]),)
    for token in placeholders(graph)[:count]:
        if token.users:
            raise CaptureError(f"{next(iter(token.users)).target} has side effects")
        graph.erase_node(token)


def _reason(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


_IDENTITIES = {aten.detach.default, aten.lift_fresh_copy.default}
_MARKERS = {torch._C._set_grad_enabled, aten._assert_tensor_metadata.default}


def _simplify(module: fx.GraphModule) -> None:
    """Drop what means nothing in a functional graph without gradients."""
    graph = module.graph
    for node in list(graph.nodes):
        if (
            node.target in _IDENTITIES and node.args[0].op != "placeholder"
        ) or node.target is torch.ops.aten.lift_fresh_copy.default:
            node.replace_all_uses_with(node.args[0])
        if node.op == "call_function" and (
            node.target in _MARKERS or not (node.users or node.is_impure())
        ):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()


@dataclass(frozen=True)
class _Describe:
    """Name, kind and persistence of an argument by its position."""

    state: Mapping[int, torch.Tensor]
    kinds: Mapping[int, str]
    names: Mapping[int, str]
    slots: Mapping[int, Slot]

    def __call__(self, position: int, default: str) -> tuple[str, Any, bool]:
        if position not in self.state:
            name = self.names.get(position, default)
            return name, self.kinds.get(position, "user"), True
        slot = self.slots.get(id(self.state[position]))
        return (slot.name, slot.kind, slot.persistent) if slot else (default, "constant", False)


def _inputs(
    dynamo: fx.Graph, functional: fx.Graph, mutations: Mapping[int, int], describe: _Describe
) -> tuple[Input, ...]:
    originals = dict(enumerate(placeholders(dynamo)))
    inputs = []
    for i, node in enumerate(placeholders(functional)):
        original = originals.get(i, node)
        value, known = example_value(original), node.meta.get("val")
        name, kind, persistent = describe(i, str(original.target))
        tensor = symbol = constant = None
        if isinstance(known, torch.Tensor):
            tensor = tensor_spec(value)
        elif isinstance(size(known), str):
            symbol = str(size(known))
        else:
            constant = value
        inputs.append(Input(name, kind, tensor, symbol, constant, persistent, i in mutations))
    return tuple(inputs)


def _symbols(graph: fx.Graph, fake_mode: FakeTensorMode) -> Iterator[Symbol]:
    """Each free symbol with the argument that shows its value."""
    seen: set[str] = set()
    for i, node in enumerate(placeholders(graph)):
        value = node.meta.get("val")
        shape = list(enumerate(value.shape)) if isinstance(value, torch.Tensor) else [(None, value)]
        for dim, extent in shape:
            if not isinstance(extent, (torch.SymInt, torch.SymFloat)):
                continue
            expression = extent.node.expr
            if expression.is_symbol and expression.name not in seen:
                seen.add(expression.name)
                lower, upper = _bounds(fake_mode, expression)
                yield Symbol(expression.name, i, dim, lower, upper)


def _bounds(fake_mode: FakeTensorMode, symbol: Any) -> tuple[int | None, int | None]:
    shape_env = fake_mode.shape_env
    bounds = shape_env.var_to_range.get(symbol) if shape_env is not None else None
    if bounds is None:
        return None, None
    lower, upper = (int(b) if b.is_Integer else None for b in (bounds.lower, bounds.upper))
    return lower, upper
