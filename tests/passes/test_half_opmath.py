"""half-opmath: arithmetic on half types computes in f32; moves keep their type."""

from __future__ import annotations

import pytest
from flambeau.dialects.context import make_context
from flambeau.passes.manager import run
from torch_mlir import ir

SOURCE = """
func.func @main(%a: !torch.vtensor<[3,3],{t}>, %b: !torch.vtensor<[3,3],{t}>)
    -> !torch.vtensor<[3,3],{t}> {{
  %0 = torch.{op} : !torch.vtensor<[3,3],{t}>{more} -> !torch.vtensor<[3,3],{t}>
  return %0 : !torch.vtensor<[3,3],{t}>
}}
"""


def widened(op, dtype):
    more = f", !torch.vtensor<[3,3],{dtype}>" if "%b" in op else ""
    module = ir.Module.parse(SOURCE.format(op=op, t=dtype, more=more), make_context())
    run(module, "half-opmath")
    module.operation.verify()
    return str(module)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["aten.mm %a, %b", "aten.exp %a", "aten.tanh %a"])
def test_arithmetic_is_widened_and_rounded_once(op, dtype):
    lines = widened(op, dtype).splitlines()
    (line,) = [line for line in lines if op.split()[0] in line]
    assert dtype not in line.split(":", 1)[1]
    assert sum("convert_element_type" in line for line in lines) == 1 + op.count("%")


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_moves_stay(dtype):
    assert "f32" not in widened("aten.t %a", dtype).replace("bf16", "")


@pytest.mark.parametrize("dtype", ["f32", "f64", "si64"])
def test_other_types_stay(dtype):
    assert "convert_element_type" not in widened("aten.mm %a, %b", dtype)
