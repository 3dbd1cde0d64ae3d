"""Pipelines: names, text and lists run through one manager; failures come with a reproducer."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from flambeau import config, guard
from flambeau.dialects.context import make_context
from flambeau.errors import PassFailed
from flambeau.passes.manager import elements, run, run_guarded, to_text
from flambeau.passes.pipelines import PIPELINES
from flambeau.passes.registry import python_passes, register
from torch_mlir import ir

MATMUL = """
func.func @main(%a: !torch.vtensor<[2,3],f32>, %b: !torch.vtensor<[3,5],f32>)
    -> !torch.vtensor<[2,5],f32> {
  %dead = torch.constant.int 7
  %0 = torch.aten.mm %a, %b : !torch.vtensor<[2,3],f32>, !torch.vtensor<[3,5],f32>
      -> !torch.vtensor<[2,5],f32>
  return %0 : !torch.vtensor<[2,5],f32>
}
"""


def parsed(text=MATMUL):
    return ir.Module.parse(text, make_context())


def as_bytes(text=MATMUL):
    import io

    buffer = io.BytesIO()
    parsed(text).operation.write_bytecode(buffer)
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def _reproducers(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "reproducer_dir", tmp_path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("canonicalize", ("canonicalize",)),
        ("canonicalize,cse", ("canonicalize", "cse")),
        ("builtin.module(canonicalize,cse)", ("canonicalize", "cse")),
        (" builtin.module( canonicalize , cse ) ", ("canonicalize", "cse")),
        ("a{x=1,y=2},func.func(b,c{z=3}),d", ("a{x=1,y=2}", "func.func(b,c{z=3})", "d")),
        (["canonicalize", "cse"], ("canonicalize", "cse")),
        ("inference", PIPELINES["inference"]),
    ],
)
def test_elements_of_a_pipeline(given, expected):
    assert elements(given) == expected


@pytest.mark.parametrize("name", PIPELINES)
def test_every_named_pipeline_runs_on_a_small_module(name):
    assert "torch" in to_text(run_guarded(as_bytes(), name))


def test_pass_changes_the_module_in_place():
    module = parsed()
    assert "constant.int 7" in str(module)
    run(module, "canonicalize")
    assert "constant.int 7" not in str(module)


def test_guarded_run_gives_what_a_run_in_process_gives():
    module = parsed()
    run(module, "inference")
    assert str(ir.Module.parse(run_guarded(as_bytes(), "inference"), make_context())) == str(module)


def test_same_bytes_each_time():
    assert run_guarded(as_bytes(), "inference") == run_guarded(as_bytes(), "inference")


def test_every_registered_pass_has_one_line_of_help():
    passes = python_passes()
    assert {"bind-parameters", "half-opmath"} <= set(passes)
    assert all((function.__doc__ or "").strip() for function in passes.values())


def test_name_is_registered_once():
    with pytest.raises(ValueError, match="bind-parameters"):
        register("bind-parameters")(lambda module: None)


@pytest.mark.parametrize(
    "pipeline",
    ["no-such-pass", ("canonicalize", "no-such-pass"), "canonicalize{no-option=1}", "a("],
)
def test_bad_pipeline_fails_with_a_reproducer(pipeline):
    with pytest.raises(PassFailed) as caught:
        run_guarded(as_bytes(), pipeline)
    assert caught.value.reproducer.exists()
    assert str(caught.value.reproducer) in str(caught.value)


def test_failing_pass_fails_with_its_diagnostics():
    source = MATMUL.replace("torch.aten.mm", "torch.aten.bmm")
    with pytest.raises(PassFailed) as caught:
        run_guarded(as_bytes(source), "torch-backend-to-linalg-on-tensors-backend-pipeline")
    assert "bmm" in caught.value.diagnostics


def test_reproducer_replays():
    with pytest.raises(PassFailed) as caught:
        run_guarded(as_bytes(), ("canonicalize", "no-such-pass"))
    first = caught.value.reproducer.read_text().splitlines()[0]
    command = shlex.split(re.fullmatch(r"// Replay: flambeau (.*)", first).group(1))
    replay = [sys.executable, "-m", "flambeau.tools.main", *command]
    done = subprocess.run(replay, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no-such-pass" in done.stderr
    replay[-1] = "--pass-pipeline=builtin.module(canonicalize)"
    assert subprocess.run(replay, capture_output=True).returncode == 0


def test_timeout_is_a_pass_failure(monkeypatch):
    monkeypatch.setattr(config, "compile_timeout", 0.0)
    with pytest.raises(PassFailed, match="time") as caught:
        run_guarded(as_bytes(), "inference")
    assert caught.value.reproducer.exists()
    monkeypatch.setattr(config, "compile_timeout", 600.0)
    run_guarded(as_bytes(), "inference")


def test_crash_is_a_pass_failure(monkeypatch):
    def crash(function, *args, timeout):
        if function is to_text:
            return guard_call(function, *args, timeout=timeout)
        raise guard.HelperDied(-11, "Stack dump: bottom", False)

    guard_call = guard.call
    monkeypatch.setattr(guard, "call", crash)
    with pytest.raises(PassFailed, match=r"SIGSEGV(.|\n)*bottom") as caught:
        run_guarded(as_bytes(), "inference")
    assert "torch.aten.mm" in caught.value.reproducer.read_text()


def test_what_is_no_mlir_fails_with_a_reproducer():
    with pytest.raises(PassFailed) as caught:
        run_guarded(b"no bytecode at all", "canonicalize")
    assert caught.value.reproducer.exists()


def test_text_with_and_without_locations():
    assert "loc(" in to_text(as_bytes(), True)
    assert "loc(" not in to_text(as_bytes(), False)
