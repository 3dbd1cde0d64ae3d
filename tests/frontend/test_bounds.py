"""Indices out of range raise, as in eager; negative ones wrap where eager's do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from flambeau import config
from flambeau.errors import IndexOutOfRange
from flambeau.tests.support import ROUTES, assert_like_eager, build, check

route = pytest.mark.parametrize("route", ROUTES)

X = torch.arange(15.0).view(5, 3)
V = torch.ones(2, 3)

# name: (program over x and a 1-D index, whether negative indices count from the end)
PROGRAMS = {
    "embedding": (lambda x, i: F.embedding(i, x), False),
    "gather": (lambda x, i: x.gather(0, i[:, None].expand(2, 3)), False),
    "index": (lambda x, i: x[i], True),
    "index of two": (lambda x, i: x[i, torch.tensor([0, 2])], True),
    "index of columns": (lambda x, i: x.t()[:, i], True),
    "index_select": (lambda x, i: x.index_select(0, i), False),
    "scatter": (lambda x, i: x.scatter(0, i[:, None].expand(2, 3), V), False),
    "scatter value": (lambda x, i: x.scatter(0, i[:, None], 7.0), False),
    "scatter_add": (lambda x, i: x.scatter_add(0, i[:, None].expand(2, 3), V), False),
    "scatter_reduce": (
        lambda x, i: x.scatter_reduce(0, i[:, None].expand(2, 3), V, "amax"),
        False,
    ),
    "index_put": (lambda x, i: x.index_put((i,), V), True),
    "index_put accumulated": (lambda x, i: x.index_put((i,), V, accumulate=True), True),
    "index_add": (lambda x, i: x.index_add(0, i, V), False),
    "index_copy": (lambda x, i: x.index_copy(0, i, V), False),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0), True),
    "take": (lambda x, i: x.take(i * 3), True),
}


@route
@pytest.mark.parametrize("name", PROGRAMS)
def test_out_of_range_raises(name, route):
    program, wraps = PROGRAMS[name]
    fast = build(program, (X, torch.tensor([0, 4])), route=route)
    assert_like_eager(fast, program, (X, torch.tensor([0, 4])), exact=True)
    bad = [[0, 5], [10**9, 0], [-6, 1]] + ([] if wraps else [[0, -1]])
    for index in bad:
        with pytest.raises((IndexError, RuntimeError)):
            program(X, torch.tensor(index))
        with pytest.raises((IndexError, RuntimeError)):
            fast(X, torch.tensor(index))
    assert_like_eager(fast, program, (X, torch.tensor([3, 1])), exact=True)


@route
@pytest.mark.parametrize("name", [name for name, (_, wraps) in PROGRAMS.items() if wraps])
def test_negative_index_counts_from_the_end(name, route):
    check(PROGRAMS[name][0], X, torch.tensor([-1, -5]), route=route, exact=True)


@route
def test_take_along_dim_wraps_any_index(route):
    program = lambda x, i: x.take_along_dim(i[:, None], 0)  # noqa: E731
    check(program, X, torch.tensor([-1, 7]), route=route)


def test_error_names_op_and_line():
    fast = build(PROGRAMS["embedding"][0], (X, torch.tensor([0])))
    with pytest.raises(IndexOutOfRange, match=r"embedding.*test_bounds\.py:\d+"):
        fast(X, torch.tensor([9]))


def test_the_failing_one_of_several_is_named():
    def program(x, i, j):
        a = x[i]
        b = F.embedding(j, x)
        return a + b

    good, bad = torch.tensor([0, 1]), torch.tensor([0, 99])
    fast = build(program, (X, good, good.clone()))
    with pytest.raises(IndexOutOfRange, match="index"):
        fast(X, bad, good)
    with pytest.raises(IndexOutOfRange, match="embedding"):
        fast(X, good, bad)


def test_int32_indices():
    for program in (lambda x, i: F.embedding(i, x), lambda x, i: x[i]):
        i = torch.tensor([0, 4], dtype=torch.int32)
        fast = check(program, X, i)
        with pytest.raises((IndexError, RuntimeError)):
            fast(X, i + 1)


def test_extent_that_varies():
    dims = ({0: torch.export.Dim("rows")}, None)
    fast = build(lambda x, i: x[i], (X, torch.tensor([0, 1])), dynamic_shapes=(dims,))
    large = torch.arange(27.0).view(9, 3)
    assert torch.equal(fast(large, torch.tensor([8, -9])), large[[8, 0]])
    with pytest.raises((IndexError, RuntimeError)):
        fast(large, torch.tensor([9, 0]))
    with pytest.raises((IndexError, RuntimeError)):
        fast(X, torch.tensor([8, 0]))


def test_boolean_mask_is_no_index():
    check(lambda x: x.masked_fill(x > 7, 0.0), X)
    check(lambda x, m: torch.where(m, x, -x), X, X > 7)


def test_out_of_range_cross_entropy_target():
    def program(x, t):
        return F.cross_entropy(x, t)

    fast = check(program, X, torch.tensor([0, 2, 1, 0, -100]))
    with pytest.raises((IndexError, RuntimeError)):
        program(X, torch.tensor([0, 3, 1, 0, 0]))
    with pytest.raises((IndexError, RuntimeError)):
        fast(X, torch.tensor([0, 3, 1, 0, 0]))


def test_select_out_of_range_is_refused_when_compiling():
    with pytest.raises(Exception, match=r"range|index"):
        build(lambda x: x.select(1, 3), (X,))(X)


def test_checks_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(config, "check_indices", False)
    fast = check(lambda x, i: x[i], X, torch.tensor([0, -1]))
    assert fast.signature.checks == ()
