"""Layouts, mutation and aliases: as eager, by both routes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from flambeau.errors import FallbackWarning
from flambeau.tests.support import ROUTES, assert_equal_bits, build, check
from torch import nn

route = pytest.mark.parametrize("route", ROUTES)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def values(dtype, *shape):
    return (torch.randn(*shape) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype(dtype):
    def program(x, y):
        return torch.where(x > y, x, y), (x != y).sum(), x[:, 1:].t()

    # IREE takes uint8 for int8: its comparisons run in eager.
    strict = dtype is not torch.uint8
    check(program, values(dtype, 5, 7), values(dtype, 5, 7), strict=strict)


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_arithmetic(dtype):
    check(lambda x, y: (x + y, x * y - 1, x.sum(), -x), values(dtype, 13), values(dtype, 13))


@pytest.mark.parametrize("dtype", DTYPES[4:-1], ids=str)
def test_integer_division_and_wrap_around(dtype):
    def program(x, y):
        return x // y, x % y, x / y, x * 100 + x * 100, x << 1, x >> 1, ~x

    y = torch.tensor([3, 2, 5, 7], dtype=dtype)
    check(program, torch.tensor([100, 7, 121, 0], dtype=dtype), y)


def test_float64_is_exact():
    x = torch.tensor([1 / 3, 1e-300, 1e300], dtype=torch.float64)
    check(lambda x: x + 1e-17 * x, x, strict=True, exact=True)


LAYOUTS = {
    "empty": lambda: torch.randn(0, 3),
    "empty inside": lambda: torch.randn(3, 0),
    "scalar": lambda: torch.tensor(1.5),
    "one": lambda: torch.randn(1, 1),
    "transposed": lambda: torch.randn(5, 7).t(),
    "strided": lambda: torch.randn(9, 10)[1::2, ::3],
    "reversed copy": lambda: torch.randn(5, 7).flip(0)[:, 2:],
    "expanded": lambda: torch.randn(1, 7).expand(5, 7),
    "expanded scalar": lambda: torch.tensor(2.0).expand(3, 5),
    "unaligned": lambda: torch.randn(36)[1:].view(5, 7),
    "odd offset": lambda: torch.randn(8, 7)[3:],
    "broadcast rows": lambda: torch.randn(5, 1).expand(5, 7),
    "conjugate free": lambda: torch.randn(3, 5).mT,
}


@route
@pytest.mark.parametrize("name", LAYOUTS)
def test_input_layout(name, route):
    check(lambda x: (x * 2, x + x.sum(), x.clone()), LAYOUTS[name](), route=route)


@route
def test_channels_last(route):
    x = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    check(nn.Conv2d(3, 4, 3).eval(), x, route=route)
    check(torch.relu, x, route=route)


def test_another_layout_than_the_example():
    fast = build(lambda x: x * 2, (torch.randn(5, 7),))
    for x in (torch.randn(7, 5).t(), torch.randn(1, 7).expand(5, 7), torch.randn(5, 14)[:, ::2]):
        found, eager = fast(x), x * 2
        assert found.stride() == eager.stride()
        assert_equal_bits(found, eager)


def test_unaligned_argument_after_an_aligned_example():
    fast = build(lambda x: x * 2, (torch.randn(5, 7),))
    x = torch.randn(36)[1:].view(5, 7)
    assert_equal_bits(fast(x), x * 2)


def test_lazy_conjugate_and_negation():
    x = torch.randn(3, 5, dtype=torch.complex64)
    check(lambda y: y * 2, x.imag)
    check(lambda y: y * 2, x.conj().imag)


def adds_in_place(x):
    x.add_(1)
    return x * 2


def writes_the_last(a, v):
    a[-1] = v
    return a


def writes_a_slice(a, v):
    a[:, 1:3] = v
    return a.sum()


def writes_masked(a, v):
    a[a > 0] = -1.0
    return a + v


def writes_through_a_view(a):
    a.view(-1)[2:5].mul_(3)
    return a


def fills_and_returns_a_view(a):
    a.fill_(2)
    return a.t(), a[0]


def mutates_twice(a):
    b = a.relu_()
    b += 1
    return b


def swaps(a, b):
    t = a.clone()
    a.copy_(b)
    b.copy_(t)


def uses_out_arguments(a, b):
    torch.add(a, 1, out=b)
    return b * 2


def updates_a_cache(cache, new):
    cache[:, 2:3].copy_(new)
    return cache.sum(1)


MUTATING = {
    "add_": (adds_in_place, lambda: (torch.randn(5),)),
    "a[-1] = v": (writes_the_last, lambda: (torch.randn(5), torch.tensor(9.0))),
    "a[-1] = row": (writes_the_last, lambda: (torch.randn(3, 5), torch.randn(5))),
    "slice": (writes_a_slice, lambda: (torch.randn(3, 5), torch.randn(3, 2))),
    "mask": (writes_masked, lambda: (torch.randn(3, 5), torch.tensor(1.0))),
    "view": (writes_through_a_view, lambda: (torch.randn(3, 5),)),
    "fill": (fills_and_returns_a_view, lambda: (torch.randn(3, 5),)),
    "twice": (mutates_twice, lambda: (torch.randn(5),)),
    "swap": (swaps, lambda: (torch.randn(5), torch.randn(5))),
    "out": (uses_out_arguments, lambda: (torch.randn(5), torch.zeros(5))),
    "cache": (updates_a_cache, lambda: (torch.zeros(2, 5, 3), torch.randn(2, 1, 3))),
    "index_put_": (
        lambda a, i, v: a.index_put_((i,), v, accumulate=True),
        lambda: (torch.zeros(5), torch.tensor([0, 0, 4]), torch.ones(3)),
    ),
    "strided argument": (adds_in_place, lambda: (torch.randn(5, 7).t(),)),
    "integers": (adds_in_place, lambda: (torch.arange(5),)),
    "unaligned": (adds_in_place, lambda: (torch.randn(6)[1:],)),
    "empty": (adds_in_place, lambda: (torch.zeros(0, 3),)),
}


@route
@pytest.mark.parametrize("name", MUTATING)
def test_mutation(name, route):
    program, make = MUTATING[name]
    check(program, *make(), route=route)


def test_mutation_is_seen_through_a_view_held_by_the_caller():
    x = torch.zeros(3, 5)
    row, version = x[1], x._version
    fast = build(adds_in_place, (x,))
    with torch.no_grad():
        fast(x)
    assert_equal_bits(row, torch.ones(5))
    assert x._version > version


class Accumulator(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(5))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.total += x
        self.count += 1
        return self.total / self.count


@route
def test_buffers_accumulate(route):
    module = Accumulator()
    twin, fast = copy.deepcopy(module), build(module, (torch.ones(5),), route=route)
    assert module.count == 0  # compiling runs nothing
    for _ in range(3):
        x = torch.randn(5)
        torch.testing.assert_close(fast(x), twin(x))
    torch.testing.assert_close(module.state_dict(), twin.state_dict())


@route
def test_key_value_cache(route):
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("keys", torch.zeros(1, 5, 3))

        def forward(self, key, position):
            self.keys.index_copy_(1, position, key)
            return self.keys.clone()

    module = Cache()
    twin = copy.deepcopy(module)
    fast = build(module, (torch.randn(1, 1, 3), torch.tensor([0])), route=route)
    for step in range(4):
        key, position = torch.randn(1, 1, 3), torch.tensor([step])
        assert_equal_bits(fast(key, position), twin(key, position))
    assert_equal_bits(module.keys, twin.keys)


ALIASING = {
    "input itself": (lambda x: x, lambda: (torch.randn(3, 5),)),
    "input and more": (lambda x: (x, x + 1, x), lambda: (torch.randn(3, 5),)),
    "transposed input": (lambda x: x.t(), lambda: (torch.randn(3, 5),)),
    "slices of the input": (lambda x: (x[1:], x[:, 2], x.view(-1)), lambda: (torch.randn(3, 5),)),
    "expanded input": (lambda x: x.expand(4, 5), lambda: (torch.randn(1, 5),)),
    "unaligned view": (lambda x: x[1:], lambda: (torch.randn(7),)),
    "views of a result": (lambda x: (y := x * 2, y.t(), y[1]), lambda: (torch.randn(3, 5),)),
    "chunks of a result": (lambda x: (x * 2).chunk(3), lambda: (torch.randn(6, 5),)),
    "split columns": (lambda x: (x * 2).split(2, 1), lambda: (torch.randn(3, 5),)),
    "unbound": (lambda x: (x + 1).unbind(), lambda: (torch.randn(3, 5),)),
    "one result twice": (lambda x: (y := x * 2, y), lambda: (torch.randn(5),)),
    "part of a result": (lambda x: (x * 2)[:, ::2], lambda: (torch.randn(3, 5),)),
    "detached": (lambda x: x.detach(), lambda: (torch.randn(5),)),
    "clone of the input": (lambda x: x.clone(), lambda: (torch.randn(3, 5),)),
    "two clones": (lambda x: (x.clone(), x.clone()), lambda: (torch.randn(3, 5),)),
    "contiguous input": (lambda x: x.contiguous(), lambda: (torch.randn(3, 5),)),
    "copied transpose": (lambda x: x.t().contiguous(), lambda: (torch.randn(3, 5),)),
    "same values": (lambda x: (x + 0, x * 1, x.relu()), lambda: (torch.rand(5),)),
    "constants": (lambda x: (torch.zeros(3), torch.zeros(3), x + 1), lambda: (torch.randn(5),)),
    "reshape of an input": (lambda x: x.reshape(-1), lambda: (torch.randn(5, 3).t(),)),
    "cast to its own type": (lambda x: x.to(torch.float32), lambda: (torch.randn(5),)),
    "inactive dropout": (
        lambda x: nn.functional.dropout(x, 0.5, False),
        lambda: (torch.randn(5),),
    ),
}


@route
@pytest.mark.parametrize("name", ALIASING)
def test_aliases(name, route):
    program, make = ALIASING[name]
    check(program, *make(), route=route, exact=True)


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.register_buffer("buffer", torch.randn(5))
        self.what = what

    def forward(self, x):
        return self.what(self, x)


@route
@pytest.mark.parametrize(
    "what",
    [
        lambda self, x: self.weight.clone(),
        lambda self, x: (self.buffer.clone(), x + 1),
        lambda self, x: self.weight,
        lambda self, x: (self.weight.t(), self.buffer[1:]),
        lambda self, x: self.weight.detach().reshape(-1),
    ],
)
def test_returned_weights(what, route):
    check(Returns(what), torch.randn(5), route=route, exact=True)


@route
@pytest.mark.parametrize(
    "program", [lambda x: torch.zeros(3), lambda x: x * 2, lambda x: x.clone(), torch.sort]
)
def test_changing_an_output_changes_no_later_one(program, route):
    x = torch.randn(3)
    with torch.no_grad():
        fast = build(program, (x,), route=route)
        for _ in range(3):
            for found in [out] if isinstance(out := fast(x), torch.Tensor) else out:
                found.fill_(77)
        assert_equal_bits(tuple(fast(x)), tuple(program(x)))


DESTRUCTIVE = {
    "index_put": (
        lambda a, i, v: a.index_put((i,), v),
        lambda: (torch.randn(64), torch.tensor([1, 3]), torch.ones(2)),
    ),
    "scatter": (
        lambda a, i, v: a.scatter(0, i, v),
        lambda: (torch.randn(64), torch.tensor([1, 3]), torch.ones(2)),
    ),
    "scatter_add": (
        lambda a, i, v: a.scatter_add(0, i, v),
        lambda: (torch.randn(64), torch.tensor([1, 1]), torch.ones(2)),
    ),
    "slice_scatter": (
        lambda a, v: torch.slice_scatter(a, v, 0, 3, 7),
        lambda: (torch.randn(64), torch.ones(4)),
    ),
    "select_scatter": (
        lambda a, v: torch.select_scatter(a, v, 0, 1),
        lambda: (torch.randn(8, 16), torch.ones(16)),
    ),
    "sort": (lambda a: a.sort(), lambda: (torch.randperm(64),)),
    "topk": (lambda a: a.topk(3), lambda: (torch.randperm(64),)),
    "argsort": (lambda a: a.argsort(), lambda: (torch.randperm(64),)),
    "cumsum": (lambda a: a.cumsum(0), lambda: (torch.randn(64),)),
    "masked_fill": (lambda a: a.masked_fill(a > 0, 1.0), lambda: (torch.randn(64),)),
    "index_copy": (
        lambda a, i, v: a.index_copy(0, i, v),
        lambda: (torch.randn(64), torch.tensor([1, 3]), torch.ones(2)),
    ),
    "clone then write": (lambda a: a.clone().index_fill_(0, torch.tensor([1]), 3.0), None),
    "two results": (lambda a: (a.sort().values, a + 1), lambda: (torch.randperm(64),)),
}


@route
@pytest.mark.parametrize("name", DESTRUCTIVE)
def test_arguments_stay_as_they_are(name, route):
    program, make = DESTRUCTIVE[name]
    check(program, *(make() if make else (torch.randn(64),)), route=route)


@pytest.mark.parametrize("name", ["index_put", "scatter_add", "sort"])
def test_weights_stay_as_they_are(name):
    program, make = DESTRUCTIVE[name]
    first, *others = make()

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("first", first)

        def forward(self, *args):
            return program(self.first, *args)

    check(Module(), *others)


@route
def test_aliased_arguments_with_mutation(route):
    def program(x, y):
        x.add_(1)
        return x + y

    def call(function):
        base = torch.arange(6.0)
        return function(base[:4], base[2:]), base

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad():
            fast = build(program, (torch.zeros(4), torch.zeros(4)), route=route)
            found = call(fast)
    assert_equal_bits(found, call(program))
    if route == "compile_module":
        assert any(issubclass(w.category, FallbackWarning) for w in caught)


@route
def test_same_argument_twice_with_mutation(route):
    def program(x, y):
        x.add_(1)
        return x * y

    with torch.no_grad():
        fast = build(program, (torch.zeros(4), torch.ones(4)), route=route)
        x = torch.ones(4)
        assert_equal_bits(fast(x, x), torch.full((4,), 4.0))
    assert_equal_bits(x, torch.full((4,), 2.0))


@route
def test_aliased_arguments_without_mutation(route):
    base = torch.randn(6)
    check(lambda x, y: x * y, base[:4], base[2:], route=route)
