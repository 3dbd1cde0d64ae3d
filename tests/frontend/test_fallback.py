"""What can't be compiled runs in eager: right, announced once, refused under strict."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from flambeau import config
from flambeau.errors import FallbackWarning, FlambeauError, PassFailed, TargetError, UnsupportedOp
from flambeau.tests.support import ROUTES, assert_like_eager, build, check, computed_in_eager
from torch import nn

route = pytest.mark.parametrize("route", ROUTES)


@torch.library.custom_op("flambeau_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@triple.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("flambeau_tests::accumulate", mutates_args={"total"})
def accumulate(total: torch.Tensor, x: torch.Tensor) -> None:
    total.add_(x)


@accumulate.register_fake
def _(total, x):
    return None


def uses_custom_op(x):
    y = x * 2 + 1
    z = triple(y)
    return z.relu() - x


def uses_inverse(x):
    y = x @ x.t() + 4 * torch.eye(3)
    return torch.linalg.inv(y) @ y + 1


def uses_cond(x):
    y = x * 2
    z = torch.cond(y.sum() > 0, lambda t: t + 1, lambda t: t - 1, (y,))
    return z * 3


def uses_several(x):
    y = triple(x + 1)
    z = torch.linalg.inv(y * 2)
    return triple(z) + torch.linalg.eigvalsh(y @ y.t())


def uses_size_from_data(x):
    return (x * 2).nonzero().sum(0) + 1


PROGRAMS = {
    "custom op": (uses_custom_op, (3, 5), "triple"),
    "inverse": (uses_inverse, (3, 3), "inv"),
    "cond": (uses_cond, (5,), "cond"),
    "several": (uses_several, (3, 3), "triple"),
}


def caught_while(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return result, [w for w in caught if issubclass(w.category, FallbackWarning)]


@route
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_right(name, route):
    program, shape, _ = PROGRAMS[name]
    check(program, torch.rand(shape), route=route)
    check(program, -torch.rand(shape), route=route)


@route
def test_result_whose_size_depends_on_data(route):
    with torch.no_grad():
        program = build(lambda x: (torch.nonzero(x > 0), x * 2), (torch.randn(9),), route=route)
        for x in (torch.randn(9), torch.ones(9), -torch.ones(9)):
            found = program(x)
            assert torch.equal(found[0], torch.nonzero(x > 0))
            assert torch.equal(found[1], x * 2)


@route
def test_size_from_data_used_further(route):
    with torch.no_grad():
        fast = build(uses_size_from_data, (torch.randn(4, 5),), route=route)
        for _ in range(3):
            x = torch.randn(4, 5).relu()
            assert torch.equal(fast(x), uses_size_from_data(x))


@route
def test_mutating_custom_op(route):
    def program(total, x):
        accumulate(total, x * 2)
        return total + 1

    check(program, torch.zeros(3), torch.randn(3), route=route)


@route
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_warning_names_op_line_and_reason(name, route):
    program, shape, op = PROGRAMS[name]
    x = torch.randn(shape)

    def run():
        with torch.no_grad():
            fast = build(program, (x,), route=route)
            for _ in range(3):
                fast(x)

    _, notices = caught_while(run)
    assert len(notices) == 1
    text = str(notices[0].message)
    assert "eager" in text
    assert op in text
    line = int(re.search(r"test_fallback\.py:(\d+)", text).group(1))
    first = program.__code__.co_firstlineno
    assert first < line <= first + 4
    assert re.search(r"test_fallback\.py:\d+: \w+", text)


def test_fallbacks_are_listed():
    fast = build(uses_several, (torch.randn(3, 3),))
    ops = " ".join(fallback.op for fallback in fast.fallbacks)
    for op in ("triple", "inv", "eigh"):
        assert op in ops
    lines = {fallback.source.rsplit(":", 1)[1] for fallback in fast.fallbacks}
    assert len(lines) >= 3
    assert all(fallback.reason for fallback in fast.fallbacks)
    assert all("test_fallback.py" in fallback.source for fallback in fast.fallbacks)


def test_supported_program_has_no_fallback_and_no_warning():
    fast, notices = caught_while(lambda: build(nn.Linear(5, 3), (torch.randn(2, 5),)))
    assert fast.fallbacks == ()
    assert notices == []


@route
def test_only_the_unsupported_op_runs_in_eager(route):
    fast, x = check(uses_custom_op, torch.randn(3, 5), route=route), torch.randn(3, 5)
    seen = computed_in_eager(fast, x)
    assert any("triple" in op for op in seen)
    assert not any(op.startswith(("aten.relu", "aten.sub", "aten.add")) for op in seen)


SUPPORTED = {
    "elementwise": (lambda x: (x * 2 + x.exp()).tanh(), (5, 7)),
    "reductions": (lambda x: (x.sum(0), x.amax(1), x.mean(), x.var(1)), (5, 7)),
    "softmax": (lambda x: x.softmax(-1).log(), (5, 7)),
    "matmul": (lambda x: x @ x.t(), (5, 7)),
    "moves": (lambda x: (x * 2).t().reshape(-1, 5).flip(0).roll(1, 0), (5, 7)),
    "attention": (lambda x: nn.functional.scaled_dot_product_attention(x, x, x), (1, 2, 5, 8)),
}


@route
@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_program_computes_nothing_in_eager(name, route):
    program, shape = SUPPORTED[name]
    fast = check(program, torch.randn(shape), route=route, strict=True)
    assert computed_in_eager(fast, torch.randn(shape)) == []


@route
def test_module_with_buffers_computes_nothing_in_eager(route):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    x = torch.randn(2, 3, 9, 9)
    assert computed_in_eager(check(module.eval(), x, route=route, strict=True), x) == []


def test_strict_names_all_at_once():
    with pytest.raises(UnsupportedOp) as caught:
        build(uses_several, (torch.randn(3, 3),), strict=True)
    text = str(caught.value)
    for op in ("triple", "inv", "eigh"):
        assert op in text
    assert len(set(re.findall(r"test_fallback\.py:(\d+)", text))) >= 3


def test_strict_warns_of_nothing():
    def run():
        with pytest.raises(UnsupportedOp):
            build(uses_custom_op, (torch.randn(3, 5),), strict=True)

    assert caught_while(run)[1] == []


def test_fallback_in_training_has_gradients():
    def program(x):
        return torch.linalg.inv(x @ x.t() + 4 * torch.eye(3)) * 2

    x = torch.randn(3, 3, requires_grad=True)
    fast = build(program, (torch.randn(3, 3),))
    (found,) = torch.autograd.grad(fast(x).sum(), x)
    (expected,) = torch.autograd.grad(program(x).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_fallback_on_a_weight_follows_its_changes():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3) * 2)

        def forward(self, x):
            return torch.linalg.inv(self.weight) @ x + 1

    module, x = Module(), torch.randn(3, 3)
    with torch.no_grad():
        fast = build(module, (x,))
        module.weight.mul_(2)
        assert_like_eager(fast, module, (x,))


def test_random_op_between_fallbacks_keeps_its_order():
    def program(x):
        first = torch.rand(3)
        middle = triple(x + first)
        return middle + torch.rand(3), torch.rand(3)

    fast, x = build(program, (torch.ones(3),)), torch.ones(3)
    torch.manual_seed(7)
    found = fast(x)
    torch.manual_seed(7)
    torch.testing.assert_close(found, program(x))


@pytest.fixture
def _short_time(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "compile_timeout", 0.01)
    monkeypatch.setattr(config, "reproducer_dir", tmp_path)


@pytest.mark.usefixtures("_short_time")
def test_tiny_time_limit_is_an_error_where_a_pipeline_is_asked_for():
    with pytest.raises((PassFailed, TargetError), match="time") as caught:
        build(nn.Linear(5, 3), (torch.randn(2, 5),), pipeline="inference")
    assert caught.value.reproducer.exists()


@pytest.mark.usefixtures("_short_time")
def test_tiny_time_limit_under_strict():
    with pytest.raises(FlambeauError, match="time"):
        build(nn.Linear(5, 3), (torch.randn(2, 5),), strict=True)


@pytest.mark.usefixtures("_short_time")
def test_tiny_time_limit_otherwise_runs_in_eager():
    x, module = torch.randn(2, 5), nn.Linear(5, 3)
    fast, notices = caught_while(lambda: build(module, (x,)))
    assert len(notices) == 1
    assert "time" in str(notices[0].message)
    assert torch.equal(fast(x), module(x))


def test_failing_pipeline_is_an_error_with_a_reproducer(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "reproducer_dir", tmp_path)
    with pytest.raises(PassFailed) as caught:
        build(nn.Linear(5, 3), (torch.randn(2, 5),), pipeline=("no-such-pass",))
    assert caught.value.reproducer.parent == tmp_path
    assert "no-such-pass" in caught.value.reproducer.read_text().splitlines()[0]
    assert str(caught.value.reproducer) in str(caught.value)
