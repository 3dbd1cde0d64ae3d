"""bind-parameters: marked arguments become loads of named parameters."""

from __future__ import annotations

import pytest
from flambeau.dialects.context import make_context
from flambeau.passes.bind_parameters import builtin_type
from flambeau.passes.manager import run
from torch_mlir import ir

SOURCE = """
"builtin.module"() ({
  "func.func"() <{
    function_type = (!torch.vtensor<[3],f32>, !torch.vtensor<[3],f32>) -> !torch.vtensor<[3],f32>,
    sym_name = "main", arg_attrs = [%s, {}]}> ({
  ^bb0(%%a: !torch.vtensor<[3],f32>, %%b: !torch.vtensor<[3],f32>):
    %%0 = "torch.aten.mul.Tensor"(%%a, %%b)
        : (!torch.vtensor<[3],f32>, !torch.vtensor<[3],f32>) -> !torch.vtensor<[3],f32>
    "func.return"(%%0) : (!torch.vtensor<[3],f32>) -> ()
  }) : () -> ()
}) : () -> ()
"""


def bound(first):
    module = ir.Module.parse(SOURCE % first, make_context())
    run(module, "bind-parameters")
    return str(module)


def test_marked_argument_is_loaded_by_its_key():
    text = bound('{flambeau.parameter = "layer.weight"}')
    assert '#stream.parameter.named<"model"::"layer.weight">' in text
    assert "util.global.load" in text
    (signature,) = [line for line in text.splitlines() if "func.func" in line]
    assert signature.count("vtensor") == 2  # one argument, one result
    assert "flambeau.parameter" not in text


def test_other_arguments_stay():
    text = bound("{}")
    assert "util.global" not in text
    (signature,) = [line for line in text.splitlines() if "func.func" in line]
    assert signature.count("vtensor") == 3


@pytest.mark.parametrize(
    ("torch_type", "expected"),
    [
        ("!torch.vtensor<[2,3],f32>", "tensor<2x3xf32>"),
        ("!torch.vtensor<[],si64>", "tensor<i64>"),
        ("!torch.vtensor<[5],ui8>", "tensor<5xi8>"),
        ("!torch.vtensor<[?,3],bf16>", "tensor<?x3xbf16>"),
        ("!torch.vtensor<[1],i1>", "tensor<1xi1>"),
    ],
)
def test_builtin_types(torch_type, expected):
    with make_context():
        assert str(builtin_type(ir.Type.parse(torch_type))) == expected


@pytest.mark.parametrize("torch_type", ["!torch.vtensor", "!torch.int", "!torch.vtensor<*,f32>"])
def test_types_without_shape_or_dtype_are_refused(torch_type):
    with make_context(), pytest.raises(ValueError, match="vtensor"):
        builtin_type(ir.Type.parse(torch_type))
