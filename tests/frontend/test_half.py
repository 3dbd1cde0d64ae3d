"""Half types accumulate in float32, as ATen does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from flambeau.tests.support import ROUTES, check
from torch import nn

PROGRAMS = {
    "matmul": (lambda x, y: x @ y, (7, 130), (130, 5)),
    "bmm": (lambda x, y: x @ y, (2, 5, 64), (2, 64, 7)),
    "linear": (F.linear, (5, 64), (13, 64)),
    "sum": (lambda x: x.sum(), (4000,)),
    "sum of rows": (lambda x: x.sum(-1), (5, 513)),
    "mean": (lambda x: x.mean(), (4000,)),
    "softmax": (lambda x: x.softmax(-1), (5, 257)),
    "log_softmax": (lambda x: x.log_softmax(-1), (5, 65)),
    "layer_norm": (lambda x: F.layer_norm(x, (65,)), (5, 65)),
    "var": (lambda x: x.var(-1), (5, 65)),
    "gelu": (F.gelu, (5, 13)),
    "silu": (F.silu, (5, 13)),
    "exp": (torch.exp, (5, 13)),
    "chain": (lambda x, y: (x * y + x) / 3, (5, 13), (5, 13)),
    "attention": (F.scaled_dot_product_attention, (1, 2, 7, 8), (1, 2, 7, 8), (1, 2, 7, 8)),
    "conv": (F.conv2d, (1, 8, 9, 9), (4, 8, 3, 3)),
    "compare": (lambda x: (x > 0.2, x == 0.1, torch.where(x > 0.1, x, 0.3)), (33,)),
    "cumsum": (lambda x: x.cumsum(0), (300,)),
    "norm": (lambda x: torch.linalg.vector_norm(x), (300,)),
    "cast": (lambda x: (x.float() * 3, x.double(), (x * 10).to(torch.int32)), (33,)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_error_is_within_three_times_eagers(name, dtype):
    program, *shapes = PROGRAMS[name]
    check(program, *(torch.randn(shape).to(dtype) for shape in shapes))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_large_sum_does_not_accumulate_in_half(dtype, route):
    x = torch.ones(20_000, dtype=dtype) * 0.5
    check(lambda x: (x.sum(), x.mean()), x, route=route)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_module(dtype):
    module = nn.Sequential(nn.Linear(13, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5))
    check(module.to(dtype), torch.randn(7, 13, dtype=dtype), strict=True)


def test_scalar_is_rounded_before_comparing():
    x = torch.tensor([0.1, 0.2, 0.2002, 0.3])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        check(lambda x: (x > 0.2, x >= 0.2, x == 0.1, x < 0.3), x.to(dtype))
