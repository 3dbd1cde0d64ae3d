"""Any number of threads may compile and call at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from flambeau.tests.support import build
from torch import nn


def in_threads(*functions):
    """Run all at once; raises the first exception of any."""
    failures = []
    barrier = threading.Barrier(len(functions))

    def guarded(function):
        try:
            barrier.wait()
            with torch.no_grad():
                function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def mlp(width):
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


@pytest.mark.parametrize("route", ["compile_module", "torch.compile"])
def test_compiling_at_once(route):
    def work(width):
        def run():
            module, x = mlp(width), torch.randn(width, 5)
            fast = build(module, (x,), route=route)
            for _ in range(5):
                close(fast(x), module(x))

        return run

    in_threads(*(work(width) for width in (7, 13, 16, 33)))


@pytest.mark.parametrize("size", [3, 300])
def test_calling_one_module_at_once(size):
    module = nn.Sequential(nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, size))
    fast = build(module, (torch.randn(size, size),))

    def work(seed):
        x = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))

        def run():
            expected = module(x)
            for _ in range(50):
                close(fast(x), expected)

        return run

    in_threads(*(work(seed) for seed in range(4)))


def test_first_calls_of_one_compiled_function_at_once():
    module = mlp(8)
    fast = torch.compile(module, backend="flambeau")

    def run():
        for size in (4, 7):
            x = torch.ones(size, 5)
            close(fast(x), module(x))

    in_threads(run, run, run)


def test_other_layouts_at_once():
    fast = build(lambda x: x * 2 + 1, (torch.ones(6, 6),))

    def work(x):
        return lambda: [close(fast(x), x * 2 + 1) for _ in range(5)]

    in_threads(
        work(torch.randn(6, 6).t()), work(torch.randn(6, 12)[:, ::2]), work(torch.ones(6, 6))
    )


def test_changing_weights_while_others_call():
    module, x = nn.Linear(5, 3, bias=False), torch.ones(2, 5)
    fast = build(module, (x,))

    def change():
        for value in range(1, 21):
            module.weight.fill_(value)

    def call():
        for _ in range(50):
            assert fast(x).isfinite().all()

    in_threads(change, call, call)
    with torch.no_grad():
        close(fast(x), torch.full((2, 3), 100.0))


def test_gradients_at_once():
    module = mlp(8)
    fast = build(module, (torch.ones(4, 5),))

    def run():
        with torch.enable_grad():
            x = torch.randn(4, 5, requires_grad=True)
            found = torch.autograd.grad(fast(x).sum(), x)
            close(found, torch.autograd.grad(module(x).sum(), x))

    in_threads(run, run, run)


_COUNTING = """
import glob, torch, flambeau
def workers():
    return sum("iree-worker" in open(f).read() for f in glob.glob("/proc/self/task/*/comm"))
torch.set_num_threads(1)
x = torch.randn(256, 256)
m = torch.nn.Linear(256, 256)
with torch.no_grad():
    fast = flambeau.compile_module(m, (x,))
    counts = []
    for n in (1, 3, 2, 3):
        torch.set_num_threads(n)
        torch.testing.assert_close(fast(x), m(x), rtol=1e-4, atol=1e-4)
        counts.append(workers())
print(*counts)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads in /proc")
def test_number_of_workers_follows_torch():
    run = subprocess.run([sys.executable, "-c", _COUNTING], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    counts = [int(word) for word in run.stdout.split()]
    assert counts[1] - counts[0] >= 2, counts
    assert counts[3] == counts[2], counts


def test_tiny_programs_have_no_workers():
    code = _COUNTING.replace("256", "8")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == ["0"] * 4, run.stderr


def test_results_after_the_number_of_threads_changed():
    module, x = nn.Linear(256, 256), torch.randn(256, 256)
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            fast = build(module, (x,))
            for threads in (1, 2, 4, 1):
                torch.set_num_threads(threads)
                torch.testing.assert_close(fast(x), module(x), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)
