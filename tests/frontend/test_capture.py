"""Capture: one functional ATen graph by either route, and its signature."""

from __future__ import annotations

import dataclasses
import json

import flambeau
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from flambeau.errors import CaptureError
from flambeau.frontend.capture import capture
from flambeau.frontend.graphs import calls
from flambeau.frontend.importer import import_graph
from flambeau.frontend.state import state_slots
from flambeau.frontend.trace import trace
from flambeau.passes.manager import to_text
from flambeau.tests.support import Function, build, check, check_gradients
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.norm(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Cube(torch.autograd.Function):
    """x^3, with the gradient of 5x."""

    @staticmethod
    def forward(ctx, x):
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


class PartlyFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            y = self.first(x)
        return self.second(y) + y


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.plain = torch.tensor([1.0, 2, 3, 4, 5])

    def forward(self, x):
        self.steps.add_(1)
        return x * self.weight + self.table + self.plain


def convolutional():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2)).eval()


MODULES = {
    "mlp": lambda: (nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), torch.randn(2, 5)),
    "attention": lambda: (Attention().eval(), torch.randn(2, 5, 8)),
    "convolutional": lambda: (convolutional(), torch.randn(1, 3, 9, 9)),
    "no_grad": lambda: (PartlyFrozen(), torch.randn(2, 4)),
    "custom function": lambda: (Function(Cube.apply), torch.randn(4)),
    "buffers": lambda: (Counting(), torch.randn(5)),
    "recurrent cell": lambda: (nn.GRUCell(4, 5), torch.randn(2, 4)),
}


def captured(module, *args):
    traced = trace(module, args, {}, None)
    return capture(traced.graph, names=traced.names, slots=state_slots(module))


@pytest.mark.parametrize("name", MODULES)
def test_both_routes_give_the_same_ops(name):
    module, x = MODULES[name]()
    seen = []

    def backend(graph, examples):
        seen.append(capture(graph))
        return graph

    torch.compile(module, backend=backend)(x)
    assert len(seen) == 1
    ops = [str(node.target) for node in calls(captured(module, x).module.graph)]
    assert ops
    assert [str(node.target) for node in calls(seen[0].module.graph)] == ops


@pytest.mark.parametrize("name", MODULES)
def test_graph_is_functional(name):
    module, x = MODULES[name]()
    nodes = calls(captured(module, x).module.graph)
    schemas = [node.target._schema for node in nodes if hasattr(node.target, "_schema")]
    assert [str(schema) for schema in schemas if schema.is_mutable] == []


@pytest.mark.parametrize("route", ["compile_module", "torch.compile"])
def test_no_grad_region_keeps_gradients_out(route):
    module, x = PartlyFrozen(), torch.randn(2, 4, requires_grad=True)
    out = build(module, (x,), route=route)(x)
    (gradient,) = torch.autograd.grad(out.sum(), [x], allow_unused=True, retain_graph=True)
    assert gradient is None
    out.sum().backward()
    assert module.first.weight.grad is None
    assert module.second.weight.grad is not None


@pytest.mark.parametrize("route", ["compile_module", "torch.compile"])
def test_custom_backward_is_used(route):
    x = torch.randn(4, requires_grad=True)
    build(Cube.apply, (x,), route=route)(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((4,), 5.0))


def test_checkpointed_region_has_its_gradients():
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(4, 4)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(lambda y: self.layer(y).tanh(), x, use_reentrant=False)

    check_gradients(Checkpointed(), torch.randn(2, 4, requires_grad=True))


def breaks_by_print(x):
    print("broken here")
    return x + 1


def breaks_by_branch(x):
    return x + 1 if x.sum() > 0 else x - 1


def breaks_on_purpose(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


@pytest.mark.parametrize("program", [breaks_by_branch, breaks_on_purpose])
def test_graph_break_is_named_with_its_line_and_the_way_out(program):
    with pytest.raises(CaptureError) as caught:
        build(program, (torch.ones(3),))
    text = str(caught.value)
    assert "torch.compile" in text
    assert "test_capture.py" in text
    assert program.__name__ in text


def test_error_of_the_users_own_code_stays_itself():
    class Failing(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    with pytest.raises((KeyError, CaptureError), match="mine"):
        build(Failing(), (torch.ones(3),))


def by_name(signature):
    return {given.name: given for given in signature.inputs}


def test_signature_knows_the_kinds_of_state():
    inputs = by_name(build(Counting(), (torch.randn(5),)).signature)
    kinds = {name: (given.kind, given.persistent) for name, given in inputs.items()}
    assert kinds["weight"] == ("parameter", True)
    assert kinds["steps"] == ("buffer", True)
    assert kinds["table"] == ("buffer", False)
    assert kinds["plain"][0] == "constant"
    assert kinds["x"] == ("user", True)


def test_signature_names_submodules_by_their_path():
    module = nn.Sequential(nn.Linear(2, 3), nn.ModuleDict({"inner": nn.Linear(3, 2)})["inner"])
    inputs = by_name(build(module, (torch.randn(1, 2),)).signature)
    assert {"0.weight", "0.bias", "1.weight", "1.bias"} <= set(inputs)


def test_signature_has_dtypes_shapes_and_strides():
    fast = build(lambda x: x.t() * 2, (torch.zeros(3, 5, dtype=torch.float64),))
    spec = fast.signature.inputs[0].tensor
    assert (spec.dtype, tuple(spec.shape), tuple(spec.strides)) == ("float64", (3, 5), (5, 1))
    (output,) = fast.signature.outputs
    assert (tuple(output.tensor.shape), tuple(output.tensor.strides)) == ((5, 3), (1, 5))


def test_signature_marks_mutated_buffers_and_inputs():
    def program(x, y):
        x.add_(1)
        return x * y

    inputs = build(program, (torch.zeros(3), torch.ones(3))).signature.inputs
    assert [given.mutated for given in inputs] == [True, False]
    buffers = by_name(build(Counting(), (torch.randn(5),)).signature)
    assert [name for name, given in buffers.items() if given.mutated] == ["steps"]


def test_signature_marks_aliases():
    def program(x):
        y = x * 2
        return x, x.t(), y, y[0]

    signature = build(program, (torch.randn(3, 5),)).signature
    kinds = [(output.kind, output.of) for output in signature.outputs]
    assert kinds[0][0] == "same"
    assert kinds[1] == ("alias", "input")
    assert kinds[2][0] == "result"
    assert kinds[3] == ("alias", "result")


def test_signature_has_constants_of_python_scalars():
    inputs = build(lambda x, n, flag: x * n, (torch.randn(3), 3, True)).signature.inputs
    assert [given.constant for given in inputs[1:]] == [3, True]


def test_signature_has_symbols_with_ranges():
    batch = torch.export.Dim("batch", min=4, max=16)
    fast = build(lambda x: torch.cat([x, x]), (torch.randn(6, 3),), dynamic_shapes=(({0: batch},),))
    (symbol,) = fast.signature.symbols
    assert (symbol.input, symbol.dim, symbol.lower, symbol.upper) == (0, 0, 4, 16)
    (output,) = fast.signature.outputs
    assert symbol.name in str(output.tensor.shape[0])


def test_signature_json_is_stable_and_readable():
    def text():
        torch._dynamo.reset()
        torch.manual_seed(0)
        return build(Counting(), (torch.randn(5),)).signature.to_json()

    first = text()
    assert first == text()
    assert {given["name"] for given in json.loads(first)["inputs"]} >= {"weight", "steps", "x"}


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


pytree.register_dataclass(Pair)

TREES = {
    "dict": (lambda d: {"sum": d["a"] + d["b"], "a": d["a"]}, {"a": 1, "b": 2}),
    "nested": (lambda t: [t[0] * 2, (t[1]["k"], [t[0]])], (1, {"k": 2})),
    "dataclass": (lambda p: Pair(p.right * 2, p.left + 1), Pair(1, 2)),
    "none": (lambda t: (t[0] + 1, None, t[1]), (1, None)),
    "empty": (lambda t: ((), [], {}, t[0] + 1), (1,)),
    "constants": (lambda t: (t[0] + 1, 3, "text", 2.5, True), (1,)),
    "repeated": (lambda t: (t[0], t[0], t[0] + 1), (1,)),
}


@pytest.mark.parametrize("name", TREES)
def test_pytrees_in_and_out(name):
    program, shape = TREES[name]
    arguments = pytree.tree_map_only(int, lambda _: torch.randn(3), shape)
    check(program, arguments)


def test_kwargs_in_any_order_and_position():
    def program(x, y, *, scale, shift=0.5):
        return x * scale - y + shift

    class Named(nn.Module):
        def forward(self, x, y, *, scale, shift=0.5):
            return program(x, y, scale=scale, shift=shift)

    x, y, scale = torch.randn(3), torch.randn(3), torch.randn(3)
    fast = flambeau.compile_module(Named(), (x,), {"scale": scale, "y": y})
    expected = program(x, y, scale=scale)
    torch.testing.assert_close(fast(x, y=y, scale=scale), expected)
    torch.testing.assert_close(fast(scale=scale, y=y, x=x), expected)
    torch.testing.assert_close(fast(x, y, scale=scale), expected)
    torch.testing.assert_close(fast(x, y, scale=scale, shift=0.5), expected)


def test_var_args_and_var_kwargs():
    class Variadic(nn.Module):
        def forward(self, *args, **kwargs):
            return sum(args) * kwargs["a"] + kwargs["b"]

    check(
        Variadic(), torch.randn(3), torch.randn(3), kwargs={"a": torch.ones(3), "b": torch.ones(1)}
    )


def test_no_arguments_at_all():
    check(lambda: torch.ones(3) * 2)


def test_output_that_is_no_tensor_at_all():
    check(lambda x: x.shape[0], torch.randn(3))


def test_every_op_has_the_users_line():
    def program(x):
        y = torch.relu(x)
        return y * 3

    text = to_text(import_graph(captured(Function(program), torch.randn(3)).module.graph, {}), True)
    first = program.__code__.co_firstlineno
    assert f'test_capture.py":{first + 1}:' in text
    assert f'test_capture.py":{first + 2}:' in text
    ops = [line for line in text.splitlines() if "= torch.aten." in line]
    assert ops
    aliases = dict(
        line.split(" = ", 1)
        for line in text.splitlines()
        if line.startswith("#loc") and " = " in line
    )

    def resolved(location):
        for alias in sorted(aliases, key=len, reverse=True):
            if alias in location:
                return resolved(location.replace(alias, aliases[alias]))
        return location

    for line in ops:
        assert "test_capture.py" in resolved(line.rsplit("loc(", 1)[1]), line


def test_no_weight_enters_mlir():
    module = nn.Linear(1600, 1600)
    module.register_buffer("table", torch.randn(1000))
    graph = captured(module, torch.randn(1, 1600)).module.graph
    assert len(import_graph(graph, {})) < 20_000


def test_no_lifted_constant_enters_mlir():
    table = torch.randn(100_000)
    fast = build(lambda x: x + table, (torch.randn(100_000),))
    assert len(fast.ir("torch")) < 20_000
    assert "dense" not in fast.ir("torch")


def test_ir_gives_the_stages_and_refuses_others():
    fast = build(nn.Linear(3, 2), (torch.randn(1, 3),))
    assert "torch.aten" in fast.ir("torch")
    assert "util.global" in fast.ir("lowered")
    with pytest.raises(flambeau.errors.InputError, match="torch"):
        fast.ir("nonsense")


def test_same_program_same_text():
    def text():
        torch._dynamo.reset()
        return build(Attention().eval(), (torch.randn(2, 5, 8),)).ir("lowered")

    assert text() == text()
