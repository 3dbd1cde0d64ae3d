"""Bytes and a target to a session over flat arguments, without torch's part in it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from flambeau import config
from flambeau.errors import TargetError
from flambeau.runtime.compiler import compile_bytecode
from flambeau.runtime.session import Program
from flambeau.runtime.targets import TARGETS, Target

CPU = TARGETS["llvm-cpu"]
ADD = b"""
func.func @main(%a: tensor<5xf32>, %b: tensor<5xf32>) -> tensor<5xf32> {
  %0 = arith.addf %a, %b : tensor<5xf32>
  return %0 : tensor<5xf32>
}
"""
WEIGHTED = b"""
util.global private @w = #stream.parameter.named<"model"::"w"> : tensor<5xf32>
func.func @main(%a: tensor<5xf32>) -> tensor<5xf32> {
  %w = util.global.load @w : tensor<5xf32>
  %0 = arith.mulf %a, %w : tensor<5xf32>
  return %0 : tensor<5xf32>
}
"""
WRITES = b"""
func.func @main(%a: tensor<64xf32>, %v: tensor<3xf32>) -> tensor<64xf32> {
  %0 = tensor.insert_slice %v into %a[2] [3] [1] : tensor<3xf32> into tensor<64xf32>
  return %0 : tensor<64xf32>
}
"""


@pytest.fixture(autouse=True)
def _reproducers(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "reproducer_dir", tmp_path)


def aligned(values):
    room = np.zeros(len(values) + 16, np.float32)
    start = (-room.ctypes.data % 64) // 4
    room[start : start + len(values)] = values
    return room[start : start + len(values)]


class _Capsule:
    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return (1, 0)


def call(session, *arrays):
    capsules = [array.__dlpack__() for array in arrays]
    return [np.from_dlpack(_Capsule(capsule)) for capsule in session(capsules)]


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_program_runs(threads):
    session = Program(compile_bytecode(ADD, CPU), CPU).bind({}, threads)
    a, b = aligned([1, 2, 3, 4, 5]), aligned([10, 20, 30, 40, 50])
    for _ in range(2):
        (found,) = call(session, a, b)
        np.testing.assert_array_equal(found, [11, 22, 33, 44, 55])


def test_sessions_of_one_program_have_weights_of_their_own():
    program = Program(compile_bytecode(WEIGHTED, CPU), CPU)
    ones, twos = (memoryview(aligned([v] * 5)).cast("B") for v in (1, 2))
    first, second = program.bind({"w": ones}, 0), program.bind({"w": twos}, 0)
    x = aligned([1, 2, 3, 4, 5])
    for _ in range(2):
        np.testing.assert_array_equal(call(first, x)[0], x)
        np.testing.assert_array_equal(call(second, x)[0], 2 * x)


def test_missing_weight_is_an_error():
    program = Program(compile_bytecode(WEIGHTED, CPU), CPU)
    with pytest.raises(Exception, match=r"parameter"):
        program.bind({"other": memoryview(aligned([1.0])).cast("B")}, 0)


def test_arguments_that_are_written_are_known():
    assert compile_bytecode(ADD, CPU).written == {}
    executable = compile_bytecode(WRITES, CPU)
    session = Program(executable, CPU).bind({}, 0)
    a = aligned(np.arange(64))
    call(session, a, aligned([7, 7, 7]))
    assert (0 in executable.written) or (a == np.arange(64)).all()


def test_same_program_same_code():
    assert compile_bytecode(ADD, CPU).code == compile_bytecode(ADD, CPU).code


@pytest.mark.parametrize(
    "source", [b"garbage", b"", b"func.func @main() { no.such_op }", b"ML\xefR\x00\x01"]
)
def test_bad_program_is_an_error_with_a_reproducer(source):
    with pytest.raises(TargetError) as caught:
        compile_bytecode(source, CPU)
    assert caught.value.reproducer.exists()
    assert str(caught.value.reproducer) in str(caught.value)


def test_diagnostics_are_kept():
    with pytest.raises(TargetError) as caught:
        compile_bytecode(b"func.func @main() { no.such_op }", CPU)
    assert "no.such_op" in caught.value.diagnostics


def test_timeout_is_an_error(monkeypatch):
    monkeypatch.setattr(config, "compile_timeout", 0.0)
    with pytest.raises(TargetError, match="time") as caught:
        compile_bytecode(ADD, CPU)
    assert caught.value.reproducer.exists()
    monkeypatch.setattr(config, "compile_timeout", 600.0)
    assert compile_bytecode(ADD, CPU).code


def test_reproducer_names_the_command_that_replays_it():
    unknown = Target("bad", CPU.device, CPU.inline_device, (*CPU.flags, "--no-such-flag"))
    with pytest.raises(Exception, match="no-such-flag") as caught:
        compile_bytecode(ADD, unknown)
    assert isinstance(caught.value, TargetError)
    first = caught.value.reproducer.read_text().splitlines()[0]
    assert first.startswith("// Replay: iree-compile ")
    assert "--no-such-flag" in first


def test_damaged_code_is_refused_at_load():
    executable = compile_bytecode(ADD, CPU)
    damaged = dataclasses.replace(executable, code=executable.code[: len(executable.code) // 2])
    with pytest.raises(Exception, match=r"."):
        Program(damaged, CPU)


@pytest.mark.parametrize("name", TARGETS)
def test_target_is_found_by_its_name_and_by_itself(name):
    assert Target.parse(name) is TARGETS[name]
    assert Target.parse(TARGETS[name]) is TARGETS[name]
    assert TARGETS[name].name == name


def test_unknown_target_is_refused_with_the_known_ones():
    with pytest.raises(TargetError, match=r"nonsense.*llvm-cpu"):
        Target.parse("nonsense")


def test_runtime_works_where_there_is_no_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['torch_mlir'] = None\n"
        "from flambeau.runtime.compiler import compile_bytecode\n"
        "from flambeau.runtime.session import Program\n"
        "from flambeau.runtime.targets import TARGETS\n"
        f"source = {ADD!r}\n"
        "Program(compile_bytecode(source, TARGETS['llvm-cpu']), TARGETS['llvm-cpu']).bind({}, 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
