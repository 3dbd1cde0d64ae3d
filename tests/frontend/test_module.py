"""CompiledModule: weights, modes, sizes that vary, and arguments that it refuses."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings

import flambeau
import pytest
import torch
import torch.nn.functional as F
from flambeau.errors import FallbackWarning, InputError, TargetError
from flambeau.tests.support import (
    assert_equal_bits,
    assert_like_eager,
    build,
    check,
    check_gradients,
    computed_in_eager,
)
from torch import nn


def mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# Weights


def test_batch_of_sequences_into_linear_after_embedding():
    module = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 13), nn.GELU(), nn.Linear(13, 5))
    for shape in ((2, 5), (1, 7), (3, 13)):
        check(module, torch.randint(0, 11, shape), strict=True)


def test_nothing_is_computed_in_eager():
    module, x = mlp(), torch.randn(5, 5)
    fast = check(module, x, strict=True)
    assert computed_in_eager(fast, x) == []
    assert computed_in_eager(module, x) != []


def load_state(module):
    module.load_state_dict({k: torch.randn_like(v) for k, v in module.state_dict().items()})


def step_optimizer(module):
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(module.parameters(), lr=0.5).step()


@torch.no_grad()
def change_in_place(module):
    module[0].weight.mul_(2)


def replace_parameter(module):
    module[0].weight = nn.Parameter(torch.randn(7, 5))


def assign_data(module):
    module[2].bias.data = torch.randn(3)


def load_assigned(module):
    state = {k: torch.randn_like(v) for k, v in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


@torch.no_grad()
def reorder(module):
    module[0].weight.copy_(module[0].weight.roll(1, 0))


CHANGES = [
    load_state,
    step_optimizer,
    change_in_place,
    replace_parameter,
    assign_data,
    load_assigned,
    reorder,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_count_from_the_next_call(change):
    module, x = mlp(), torch.randn(2, 5)
    with torch.no_grad():
        fast = build(module, (x,))
        before = fast(x)
        for _ in range(2):
            change(module)
            close(fast(x), module(x))
        assert not torch.equal(before, fast(x))


def test_changes_through_the_compiled_module_are_the_modules():
    module, x = mlp(), torch.randn(2, 5)
    fast = build(module, (x,))
    load_state(fast)
    close(fast(x), module(x))
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    module(x).sum().backward()
    optimizer.step()
    close(fast(x), module(x))


@pytest.mark.parametrize("write", ["data", "numpy"])
def test_refresh_after_writes_that_leave_no_trace(write):
    module, x = mlp(), torch.randn(2, 5)
    with torch.no_grad():
        fast = build(module, (x,))
        fast(x)
        if write == "data":
            module[0].weight.data.add_(1)
        else:
            module[0].weight.detach().numpy()[:] += 1
        fast.refresh()
        close(fast(x), module(x))


def test_changed_buffer_and_constant():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("buffer", torch.zeros(5))
            self.plain = torch.zeros(5)

        def forward(self, x):
            return x + self.buffer + self.plain

    module, x = Table(), torch.randn(5)
    fast = build(module, (x,))
    module.buffer.add_(1)
    module.plain.add_(2)
    close(fast(x), x + 3)
    module.buffer, module.plain = torch.full((5,), 10.0), torch.full((5,), 20.0)
    close(fast(x), x + 30)


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 5)
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, i):
            return self.head(self.embed(i))

    module, i = Tied(), torch.tensor([[1, 6, 0]])
    with torch.no_grad():
        fast = check(module, i)
        module.embed.weight.mul_(3)
        close(fast(i), module(i))


def test_two_modules_of_one_class_keep_their_weights_apart():
    x = torch.randn(2, 5)
    first, second = mlp(), mlp()
    with torch.no_grad():
        fast = [build(module, (x,)) for module in (first, second)]
        for _ in range(2):
            close(fast[0](x), first(x))
            close(fast[1](x), second(x))


def test_state_dict_has_the_names_of_the_original():
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    fast = build(module.eval(), (torch.randn(2, 3),))
    assert list(fast.state_dict()) == list(module.state_dict())
    assert [name for name, _ in fast.named_parameters()] == [
        name for name, _ in module.named_parameters()
    ]
    assert {id(p) for p in fast.parameters()} == {id(p) for p in module.parameters()}
    assert_equal_bits(fast.state_dict(), module.state_dict())


def test_attributes_are_those_of_the_module():
    module = mlp()
    module.note = "mine"
    assert build(module, (torch.randn(1, 5),)).note == "mine"


def test_state_dict_round_trips_through_a_file():
    module, x = mlp(), torch.randn(2, 5)
    fast, file = build(module, (x,)), io.BytesIO()
    expected = module(x)
    torch.save(fast.state_dict(), file)
    load_state(module)
    file.seek(0)
    fast.load_state_dict(torch.load(file))
    close(fast(x), expected)


# Modes


class Modal(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.linear(x)))


def test_train_and_eval_switch():
    module, x = Modal().eval(), torch.randn(6, 5)
    twin, fast = copy.deepcopy(module), build(module, (x,))
    with torch.no_grad():
        for mode in (False, True, False, True):
            fast.train(mode)
            assert module.training is module.norm.training is mode
            twin.train(mode)
            torch.manual_seed(3)
            found = fast(x)
            torch.manual_seed(3)
            close(found, twin(x))
    torch.testing.assert_close(module.state_dict(), twin.state_dict())


def test_mode_of_a_submodule_counts():
    module, x = Modal().train(), torch.randn(6, 5)
    fast = build(module, (x,))
    module.drop.eval()
    module.norm.eval()
    with torch.no_grad():
        close(fast(x), module(x))


@pytest.mark.parametrize("shape", [(100,), (5, 7, 13)])
def test_dropout_draws_eagers_numbers(shape):
    class Dropping(nn.Module):
        def forward(self, x):
            return F.dropout(F.dropout(x + 1, 0.3) * 2, 0.6)

    x = torch.randn(shape)
    fast = build(Dropping(), (x,))
    with torch.no_grad():
        torch.manual_seed(5)
        first, second = fast(x), fast(x)
        torch.manual_seed(5)
        close((first, second), (Dropping()(x), Dropping()(x)))
    assert not torch.equal(first, second)


def test_random_numbers_follow_the_seed():
    def program(x):
        return x + torch.rand(5), torch.randn(3), torch.randint(0, 9, (4,)), torch.bernoulli(x)

    x = torch.rand(5)
    fast = build(program, (x,))
    torch.manual_seed(5)
    found = fast(x)
    torch.manual_seed(5)
    assert_equal_bits(found, program(x))


def test_batch_norm_updates_its_statistics():
    module = nn.BatchNorm2d(3).train()
    for _ in range(2):
        check(module, torch.randn(4, 3, 5, 5), strict=True)
    module, x = nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5)
    twin, fast = copy.deepcopy(module), build(module, (x,))
    with torch.no_grad():
        for _ in range(3):
            fast(x)
            twin(x)
    torch.testing.assert_close(module.state_dict(), twin.state_dict())
    assert module.num_batches_tracked == 3


@pytest.mark.parametrize(
    ("options", "route"),
    # Without momentum the factor depends on data: no single graph.
    [({"affine": False}, "compile_module"), ({"momentum": None}, "torch.compile")],
)
def test_batch_norm_without_affine_or_momentum(options, route):
    module = nn.BatchNorm1d(4, **options)
    check(module.train(), torch.randn(7, 4), route=route)
    check(module.eval(), torch.randn(7, 4), route=route)


def test_to_another_dtype():
    module, x = mlp(), torch.randn(2, 5)
    fast = build(module, (x,))
    fast.to(torch.float64)
    wide = x.double()
    with torch.no_grad():
        found = fast(wide)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, module(wide), rtol=1e-13, atol=1e-13)


def test_to_another_dtype_behind_the_compiled_modules_back():
    module, x = mlp(), torch.randn(2, 5)
    fast = build(module, (x,))
    module.double()
    wide = x.double()
    with torch.no_grad(), contextlib.suppress(InputError):
        torch.testing.assert_close(fast(wide), module(wide), rtol=1e-13, atol=1e-13)
    with pytest.raises(Exception, match=r"float|dtype|double"):  # as in eager
        fast(x)


def test_deepcopy_has_weights_of_its_own():
    module, x = mlp(), torch.randn(2, 5)
    with torch.no_grad():
        fast = build(module, (x,))
        twin = copy.deepcopy(fast)
        close(twin(x), module(x))
        module[0].weight.add_(1)
        close(fast(x), module(x))
        assert not torch.allclose(twin(x), fast(x))
        next(twin.parameters()).mul_(3)
        close(fast(x), module(x))


def test_compiled_module_inside_another_module():
    module, x = mlp(), torch.randn(2, 5)
    outer = nn.Sequential(build(module, (x,)), nn.Softmax(-1))
    close(outer(x), module(x).softmax(-1))
    assert sum(p.numel() for p in outer.parameters()) == sum(p.numel() for p in module.parameters())


# Gradients


def test_first_order_gradients():
    check_gradients(mlp(), torch.randn(5, 5, requires_grad=True))


def test_gradients_of_several_outputs_and_inputs():
    def program(x, y, i):
        return {"a": x * y, "b": [(x + 1).exp(), i + 1]}, y.sin()

    x, y = (torch.randn(5, requires_grad=True) for _ in range(2))
    check_gradients(program, x, y, torch.arange(5))


def test_gradients_with_an_input_that_needs_none():
    check_gradients(mlp(), torch.randn(5, 5))


def test_second_order_gradients():
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(2, 3)

    def double_backward(function):
        inputs = x.clone().requires_grad_()
        out = function(inputs).sum()
        (first,) = torch.autograd.grad(out, inputs, create_graph=True)
        return torch.autograd.grad((first**2).sum(), [inputs, *module.parameters()][:4])

    for found, expected in zip(
        double_backward(build(module, (x,))), double_backward(module), strict=True
    ):
        close(found, expected)


def test_gradcheck():
    example = [torch.randn(3, 2, dtype=torch.float64) for _ in range(2)]
    fast = build(lambda x, y: (x * y).tanh().sum(0), example)
    inputs = [torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(fast, inputs)
    assert torch.autograd.gradgradcheck(fast, inputs)


def test_gradients_accumulate_and_graph_can_be_kept():
    module, x = mlp(), torch.randn(2, 5)
    twin, fast = copy.deepcopy(module), build(module, (x,))
    out, expected = fast(x).sum(), twin(x).sum()
    for loss in (out, expected):
        loss.backward(retain_graph=True)
        loss.backward()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        close(ours.grad, theirs.grad)


MUTATIONS = {
    "view returned": lambda x, w: (x * w).t(),
    "input view returned": lambda x, w: (x.t(), x * w),
    "non-leaf input changed": lambda x, w: (x * 1).mul_(w),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_gradients_through_views_and_mutation(name):
    x, w = (torch.randn(3, 5, requires_grad=True) for _ in range(2))
    check_gradients(MUTATIONS[name], x, w)


def test_gradients_through_a_changed_argument():
    def program(x, w):
        x.mul_(w)
        return x * w

    def run(function):
        leaf = torch.ones(3, requires_grad=True)
        w = torch.tensor([2.0, 3, 4], requires_grad=True)
        inner = leaf * 1
        out = function(inner, w)
        return torch.autograd.grad((out + inner).sum(), [leaf, w])

    fast = build(program, (torch.ones(3), torch.ones(3)))
    close(run(fast), run(program))


def test_no_detached_output_in_grad_mode():
    for program in (lambda x: x * 2, lambda x: x.t(), lambda x: x, lambda x: (x, x[0])):
        x = torch.randn(3, 5, requires_grad=True)
        out = build(program, (torch.randn(3, 5),))(x)
        for leaf in [out] if isinstance(out, torch.Tensor) else out:
            assert leaf.requires_grad


def test_no_gradients_without_grad_mode():
    module, x = mlp(), torch.randn(2, 5)
    fast = build(module, (x,))
    with torch.no_grad():
        assert not fast(x).requires_grad
    with torch.inference_mode():
        assert not fast(x).requires_grad
    assert fast(x).requires_grad
    module.requires_grad_(False)
    assert not fast(x).requires_grad


def test_eager_backward_is_noticed_once():
    module, x = mlp(), torch.randn(2, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast = build(module, (x,))
        for _ in range(3):
            fast(x).sum().backward()
    notices = [w for w in caught if issubclass(w.category, FallbackWarning)]
    assert len(notices) <= 1
    assert all("eager" in str(w.message) for w in notices)


def test_dropout_in_training_has_matching_forward_and_backward():
    x = torch.randn(100, requires_grad=True)
    out = build(lambda x: F.dropout(x * 3, 0.5), (torch.randn(100),))(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient != 0, out != 0)


# Sizes that vary

BATCH = torch.export.Dim("batch", min=1, max=64)


@pytest.mark.parametrize("dynamic", [({0: BATCH},), ({0: torch.export.Dim.DYNAMIC},)])
def test_batch_sizes(dynamic):
    module = mlp()
    with torch.no_grad():
        fast = build(module, (torch.randn(4, 5),), dynamic_shapes=dynamic)
        for size in (4, 7, 13, 2, 1):
            assert_like_eager(fast, module, (torch.randn(size, 5),))


def test_empty_batch():
    fast = build(mlp(), (torch.randn(4, 5),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    with torch.no_grad():
        assert_like_eager(fast, fast._module, (torch.randn(0, 5),))


def test_two_dims_and_shapes_that_depend_on_them():
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")

    class Program(nn.Module):
        def forward(self, x, y):
            z = torch.cat([x, y], 1)
            return z.flatten(0, 1), z.mean(1), x.transpose(0, 1), z.shape[1], z.new_zeros(z.shape)

    shapes = {"x": {0: batch, 1: length}, "y": {0: batch, 1: length}}
    with torch.no_grad():
        example = torch.randn(3, 5, 2), torch.randn(3, 5, 2)
        fast = build(Program(), example, dynamic_shapes=shapes)
        for size in ((3, 5), (7, 4), (2, 13)):
            assert_like_eager(fast, Program(), (torch.randn(*size, 2), torch.randn(*size, 2)))


def test_attention_with_dynamic_batch_and_length(request):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    module = Attention().eval()
    # Eager's own fast path lays the result out otherwise than its graph says.
    torch.backends.mha.set_fastpath_enabled(False)
    request.addfinalizer(lambda: torch.backends.mha.set_fastpath_enabled(True))
    with torch.no_grad():
        fast = build(module, (torch.randn(2, 5, 16),), dynamic_shapes=({0: batch, 1: length},))
        for size in ((2, 5), (3, 13), (5, 7)):
            assert_like_eager(fast, module, (torch.randn(*size, 16),))


def test_sizes_out_of_range_and_mismatched_are_refused():
    batch = torch.export.Dim("batch", min=3, max=8)

    class Program(nn.Module):
        def forward(self, x, y):
            return x + y

    fast = build(
        Program(), (torch.ones(4, 5), torch.ones(4, 5)), dynamic_shapes=({0: batch}, {0: batch})
    )
    for size in (9, 2):
        with pytest.raises(InputError, match=rf"x.*\[3, 8\].*{size}"):
            fast(torch.randn(size, 5), torch.randn(size, 5))
    with pytest.raises(InputError, match=r"y"):
        fast(torch.randn(4, 5), torch.randn(5, 5))
    with pytest.raises(InputError, match=r"x.*\[4, 6\]"):
        fast(torch.randn(4, 6), torch.randn(4, 6))


def test_ints_named_in_dynamic_shapes_vary():
    class Program(nn.Module):
        def forward(self, x, n):
            return x * n + n

    x = torch.randn(5)
    shapes = {"x": None, "n": torch.export.Dim.DYNAMIC}
    fast = build(Program(), (x, 3), dynamic_shapes=shapes)
    for n in (3, 5, 100, 2, 1, 0, -4):
        close(fast(x, n), x * n + n)
    with pytest.raises(InputError, match="n"):
        fast(x, "3")


def test_int_that_is_a_size():
    class Program(nn.Module):
        def forward(self, x, n):
            return x[:n] + torch.arange(n)

    shapes = {"x": None, "n": torch.export.Dim.DYNAMIC}
    fast = build(Program(), (torch.randn(9), 3), dynamic_shapes=shapes)
    x = torch.randn(9)
    for n in (3, 7, 9):
        close(fast(x, n), x[:n] + torch.arange(n))


def test_dynamic_shapes_are_refused_like_torch_export_does():
    with pytest.raises(Exception, match=r"batch|specializ|constant"):
        build(lambda x: x.view(4, 5), (torch.randn(4, 5),), dynamic_shapes=(({0: BATCH},),))


def test_one_example_tensor_passed_twice_stands_for_two_arguments():
    x, y = torch.randn(5), torch.randn(5)
    fast = build(lambda x, y: x - y, (x, x))
    close(fast(x, y), x - y)
    close(fast(x, x), x - x)


# What is refused


def test_another_value_of_a_constant_is_refused_by_name():
    class Program(nn.Module):
        def forward(self, x, scale, flag=True):
            return x * scale if flag else x

    x = torch.randn(3)
    fast = flambeau.compile_module(Program(), (x, 2), {"flag": True})
    close(fast(x, 2, flag=True), x * 2)
    with pytest.raises(InputError, match=r"scale.*2.*got 3"):
        fast(x, 3, flag=True)
    with pytest.raises(InputError, match="flag"):
        fast(x, 2, flag=False)
    with pytest.raises(InputError, match="scale"):
        fast(x, 2.0, flag=True)


X = torch.ones(2, 5)
BAD_CALLS = {
    "too few": ((), "input"),
    "too many": ((X, X), "too many"),
    "shape": ((torch.ones(2, 6),), r"\[2, 5\].*\[2, 6\]"),
    "rank": ((torch.ones(5),), r"\[2, 5\].*\[5\]"),
    "dtype": ((X.double(),), "float32.*float64"),
    "meta": ((X.to("meta"),), "meta"),
    "sparse": ((X.to_sparse(),), "sparse"),
    "number": ((3,), "3"),
    "none": ((None,), "None"),
    "list": (([X],), "input"),
    "numpy": ((X.numpy(),), "input"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call_is_refused(name):
    arguments, text = BAD_CALLS[name]
    fast = build(mlp(), (X,))
    with pytest.raises(InputError, match=text) as caught:
        fast(*arguments)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)
    close(fast(X), fast._module(X))


def test_unknown_keyword_is_refused_by_name():
    with pytest.raises(InputError, match="nonsense"):
        build(mlp(), (X,))(X, nonsense=1)


@pytest.mark.parametrize("model", [lambda x: x, "model", None, torch.ones(3), nn.Linear])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(InputError, match="Module"):
        flambeau.compile_module(model, (X,))


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (X, None, "tuple"),
        (3, None, "int"),
        (None, None, "NoneType"),
        ((X.to("meta"),), None, r"args\[0\].*meta"),
        ((X.to_sparse(),), None, r"args\[0\].*sparse"),
        ((), {"input": X.to("meta")}, r"kwargs.*input.*meta"),
        ((X,), [1], "kwargs"),
    ],
)
def test_bad_example_arguments_are_refused(args, kwargs, text):
    with pytest.raises(InputError, match=text):
        flambeau.compile_module(mlp(), args, kwargs)


def test_example_arguments_that_the_module_does_not_take():
    with pytest.raises((InputError, TypeError)):
        flambeau.compile_module(mlp(), (X, X))


def test_module_on_another_device_is_refused():
    with pytest.raises(flambeau.errors.FlambeauError, match="meta"):
        flambeau.compile_module(nn.Linear(5, 3, device="meta"), (X,))


@pytest.mark.parametrize("target", ["", "llvm", "no-such-target", "cuda:99"])
def test_unknown_target_is_refused_with_the_known_ones(target):
    with pytest.raises(TargetError, match="llvm-cpu"):
        flambeau.compile_module(mlp(), (X,), target=target)


def test_target_that_is_no_name_is_refused():
    with pytest.raises(flambeau.errors.FlambeauError):
        flambeau.compile_module(mlp(), (X,), target=3)
