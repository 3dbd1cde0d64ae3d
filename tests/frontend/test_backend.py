"""torch.compile(backend="flambeau")."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings

import pytest
import torch
import torch._dynamo.config
from flambeau.errors import FallbackWarning, FlambeauError, UnsupportedOp
from flambeau.tests.support import (
    assert_like_eager,
    check,
    check_gradients,
    computed_in_eager,
)
from torch import nn
from torch._dynamo.utils import counters


def mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def compiled(program, **options):
    return torch.compile(program, backend="flambeau", **options)


def graphs():
    """How many graphs Dynamo has handed over since it was reset."""
    return counters["stats"]["unique_graphs"]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_backend_is_found_without_an_import():
    code = (
        "import sys, torch\n"
        "assert 'flambeau' in torch.compiler.list_backends(exclude_tags=())\n"
        "fast = torch.compile(lambda x: x + 1, backend='flambeau')\n"
        "assert 'flambeau.frontend' not in sys.modules\n"
        "print(fast(torch.ones(3)).tolist())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "[2.0, 2.0, 2.0]", run.stderr


def test_nothing_is_compiled_before_the_first_call():
    fast = compiled(mlp())
    assert graphs() == 0
    fast(torch.randn(2, 5))
    assert graphs() == 1


def test_graph_break_in_the_middle():
    class Program(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x) if x.sum() > 0 else self.second(-x)

    fast = check(Program(), torch.randn(3, 5), route="torch.compile")
    assert graphs() >= 2
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, 5)
            close(fast(x), fast._orig_mod(x))


def test_fullgraph_raises_at_a_break():
    def program(x):
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(program, fullgraph=True)(torch.ones(3))
    close(compiled(lambda x: x + 1, fullgraph=True)(torch.ones(3)), torch.full((3,), 2.0))


def test_second_batch_size_costs_one_recompilation_and_a_third_none():
    module = mlp()
    fast = compiled(module)
    with torch.no_grad():
        seen = []
        for size in (4, 7, 13, 5, 29):
            assert_like_eager(fast, module, (torch.randn(size, 5),))
            seen.append(graphs())
    assert seen[0] == 1
    assert seen[1] <= 2
    assert seen[2:] == [seen[1]] * 3


def test_second_batch_size_in_training():
    module, twin = mlp(), None
    fast = compiled(module)
    for size in (4, 7, 13):
        twin = copy.deepcopy(module)
        module.zero_grad()
        x = torch.randn(size, 5)
        fast(x).square().sum().backward()
        twin(x).square().sum().backward()
        close(module[0].weight.grad, twin[0].weight.grad)
    assert graphs() <= 2


@pytest.mark.parametrize("values", [(2, 3, 5, 100, 7), (0.5, 0.25, 1.75, -3.0, 1e30)], ids=str)
def test_changing_number_costs_one_recompilation(values):
    def program(x, n):
        return x * n + n

    fast, seen = compiled(program), []
    x = torch.randn(5)
    for value in values:
        close(fast(x, value), program(x, value))
        seen.append(graphs())
    assert seen[1] <= 2
    assert seen[2:] == [seen[1]] * 3


def test_changing_float_is_not_rounded_to_float32():
    def program(x, scale):
        return x * scale

    fast, x = compiled(program), torch.ones(3, dtype=torch.float64)
    for scale in (0.1, 0.2, 1 / 3):
        assert torch.equal(fast(x, scale), x * scale)


def test_changing_attribute_of_a_module():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 1.0

        def forward(self, x):
            return x * self.scale

    module, x = Scaled(), torch.randn(5)
    fast = compiled(module)
    for scale in (1.0, 2.5, 7.25):
        module.scale = scale
        close(fast(x), x * scale)


def test_int_as_a_size():
    fast = compiled(lambda x, n: x.new_zeros(n).sum() + x[:n])
    x = torch.randn(20)
    for n in (3, 5, 8, 1):
        close(fast(x, n), x[:n])


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_dynamic(dynamic):
    module = mlp()
    fast = compiled(module, dynamic=dynamic)
    with torch.no_grad():
        for size in (4, 7, 13):
            assert_like_eager(fast, module, (torch.randn(size, 5),))
    assert graphs() == {True: 1, False: 3, None: 2}[dynamic]


def test_mark_dynamic():
    module = mlp()
    fast = compiled(module)
    with torch.no_grad():
        for size in (4, 7, 13):
            x = torch.randn(size, 5)
            torch._dynamo.mark_dynamic(x, 0)
            close(fast(x), module(x))
    assert graphs() == 1


def test_sizes_one_and_zero():
    module = mlp()
    fast = compiled(module)
    with torch.no_grad():
        for size in (4, 1, 0, 7):
            assert_like_eager(fast, module, (torch.randn(size, 5),))


def test_dynamic_batch_and_length_of_attention():
    module = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    fast = compiled(module, dynamic=True)
    with torch.no_grad():
        for shape in ((2, 5, 16), (3, 7, 16)):
            x = torch.randn(shape)
            torch.testing.assert_close(fast(x), module(x), rtol=1e-5, atol=1e-5)


def test_inference_mode():
    module, x = mlp(), torch.randn(4, 5)
    fast = compiled(module)
    with torch.inference_mode():
        close(fast(x), module(x))
        close(fast(torch.ones(4, 5)), module(torch.ones(4, 5)))
    close(fast(x), module(x))
    assert fast(x).requires_grad


def test_modules_made_in_inference_mode():
    with torch.inference_mode():
        module, x = mlp(), torch.randn(4, 5)
        fast = compiled(module)
        close(fast(x), module(x))


def test_grad_mode_switch():
    module, x = mlp(), torch.randn(4, 5)
    fast = compiled(module)
    for _ in range(2):
        with torch.no_grad():
            assert not fast(x).requires_grad
        out = fast(x)
        assert out.requires_grad
        close(out, module(x))


def assert_autocast_like_eager(found, eager, exact):
    assert found.dtype is eager.dtype is torch.bfloat16
    error, own = ((t.double() - exact).abs().max() for t in (found, eager))
    assert error <= 3 * own + 4 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_autocast_around_the_call():
    module, x = mlp(), torch.randn(4, 5)
    exact = copy.deepcopy(module).double()(x.double())
    fast = compiled(module)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_autocast_like_eager(fast(x), module(x), exact)
    with torch.no_grad():
        close(fast(x), module(x))


def test_autocast_inside():
    class Program(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.inner(x)
            return x

    module, x = Program(), torch.randn(4, 5)
    exact = copy.deepcopy(module.inner).double()(x.double())
    with torch.no_grad():
        assert_autocast_like_eager(compiled(module)(x), module(x), exact)


def test_autocast_trains():
    module, x = mlp(), torch.randn(4, 5)
    twin, fast = copy.deepcopy(module), compiled(module)
    for function in (fast, twin):
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(x).float().square().sum()
        loss.backward()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.05)


def test_strict_runs_what_is_supported_and_raises_for_what_is_not():
    fast = compiled(mlp(), options={"strict": True})
    with torch.no_grad():
        assert computed_in_eager(check(mlp(), torch.randn(2, 5), route="torch.compile"), X) == []
        fast(torch.randn(2, 5))
    with pytest.raises(Exception, match=r"inv") as caught, torch.no_grad():
        compiled(torch.linalg.inv, options={"strict": True})(torch.eye(3))
    assert isinstance(caught.value, UnsupportedOp) or "UnsupportedOp" in str(caught.value)


X = torch.ones(2, 5)


def test_unknown_option_is_refused_by_name():
    with pytest.raises(Exception, match="nonsense"):
        compiled(mlp(), options={"nonsense": 1})(X)


def test_kwargs_and_defaults():
    def program(x, *, scale=2.0, shift=None):
        return x * scale if shift is None else x * scale + shift

    fast, x = compiled(program), torch.randn(3)
    close(fast(x), program(x))
    close(fast(x, scale=3.0), program(x, scale=3.0))
    close(fast(x, shift=x), program(x, shift=x))


def test_training_steps_equal_eager():
    module = mlp()
    twin, fast = copy.deepcopy(module), compiled(module)
    for function, owner in ((fast, module), (twin, twin)):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(owner.parameters(), lr=0.01)
        for _ in range(3):
            x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
            loss = nn.functional.cross_entropy(function(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(module.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)


def test_training_with_dropout_and_batch_norm_equals_eager():
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 2))
    twin, fast, x = copy.deepcopy(module), compiled(module), torch.randn(6, 5)
    for function in (fast, twin):
        torch.manual_seed(1)
        function(x).square().sum().backward()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        close(ours.grad, theirs.grad)
    torch.testing.assert_close(module.state_dict(), twin.state_dict())


TRAINED = {
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(36, 2)),
        (2, 3, 5, 5),
    ),
    "norm": (lambda: nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Softmax(-1)), (2, 5)),
    "lstm cell": (lambda: nn.LSTMCell(5, 4), (2, 5)),
}


@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name):
    make, shape = TRAINED[name]
    check_gradients(make(), torch.randn(shape, requires_grad=True), route="torch.compile")


def test_compiled_step_with_backward_inside_breaks_and_is_right():
    module, x = mlp(), torch.randn(4, 5)
    twin = copy.deepcopy(module)

    def step(module):
        loss = module(x).square().sum()
        loss.backward()
        return loss

    close(compiled(step)(module), step(twin))
    close(module[0].weight.grad, twin[0].weight.grad)


def test_changed_weights_count():
    module, x = mlp(), torch.randn(4, 5)
    fast = compiled(module)
    with torch.no_grad():
        fast(x)
        module[0].weight.mul_(2)
        close(fast(x), module(x))
        module[2].bias.data = torch.randn(3)
        close(fast(x), module(x))
        module[0].weight = nn.Parameter(torch.randn(7, 5))
        close(fast(x), module(x))


def test_blocks_of_one_kind_share_no_weights():
    blocks = nn.ModuleList(mlp() for _ in range(3))
    x = torch.randn(2, 5)
    expected = [block(x) for block in blocks]
    for block in blocks:
        block.compile(backend="flambeau")
    with torch.no_grad():
        for _ in range(2):
            for block, wanted in zip(blocks, expected, strict=True):
                close(block(x), wanted)


def test_train_and_eval():
    module, x = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)), torch.randn(4, 5)
    fast = compiled(module)
    with torch.no_grad():
        for mode in (True, False, True):
            module.train(mode)
            torch.manual_seed(2)
            found = fast(x)
            torch.manual_seed(2)
            close(found, module(x))


def test_random_numbers_follow_the_seed():
    def program(x):
        return x + torch.rand(5) + torch.randn(5)

    fast = compiled(program)
    torch.manual_seed(4)
    found = [fast(torch.ones(5)) for _ in range(2)]
    torch.manual_seed(4)
    close(found, [program(torch.ones(5)) for _ in range(2)])
    assert not torch.equal(*found)


def test_numpy_and_containers():
    def program(d, items):
        return {"out": d["a"] + sum(items), "n": len(items)}

    fast = compiled(program)
    given = ({"a": torch.randn(3)}, [torch.randn(3), torch.randn(3)])
    close(fast(*given), program(*given))


def test_function_without_tensors():
    assert compiled(lambda n: n + 1)(2) == 3


def test_decorator():
    @torch.compile(backend="flambeau")
    def program(x):
        return x.sin() + 1

    close(program(torch.ones(3)), torch.ones(3).sin() + 1)


def test_tensor_subclass_runs_in_eager_with_one_warning_or_right():
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(3), torch.randn(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        found = compiled(lambda x: x * 2)(x)
    close(found.a, x.a * 2)
    close(found.b, x.b * 2)


def test_meta_tensor_is_not_given_to_native_code():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = compiled(lambda x: x * 2)(torch.ones(3, device="meta"))
        except (FlambeauError, RuntimeError):
            return
    assert found.device.type == "meta"


def test_vmap_and_functional_grad():
    weight = torch.randn(5, 5)

    def program(x):
        return torch.func.grad(lambda y: (y @ weight).tanh().sum())(x)

    x = torch.randn(5)
    close(compiled(program)(x), program(x))
    batched = torch.randn(3, 5)
    close(compiled(torch.vmap(program))(batched), torch.vmap(program)(batched))
