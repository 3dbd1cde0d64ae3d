"""Native code that crashes, hangs or raises becomes an exception; the process goes on."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from flambeau import guard


def assert_pool_works():
    assert guard.call(operator.add, 1, 2, timeout=60) == 3


def test_returns_what_the_function_returns():
    assert guard.call(sorted, [3, 1, 2], timeout=60) == [1, 2, 3]


def test_runs_in_another_process():
    assert guard.call(os.getpid, timeout=60) != os.getpid()


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGFPE", "SIGKILL"])
def test_crash_becomes_an_exception_that_names_the_signal(name):
    with pytest.raises(guard.HelperDied, match=name) as caught:
        guard.call(signal.raise_signal, getattr(signal, name), timeout=60)
    assert not caught.value.timed_out
    assert_pool_works()


def test_exit_becomes_an_exception():
    with pytest.raises(guard.HelperDied, match="exit 3"):
        guard.call(os._exit, 3, timeout=60)
    assert_pool_works()


def test_hang_is_stopped():
    with pytest.raises(guard.HelperDied, match="ran out of time") as caught:
        guard.call(time.sleep, 3600, timeout=0.5)
    assert caught.value.timed_out
    assert_pool_works()


def test_exception_keeps_its_type():
    with pytest.raises(ZeroDivisionError):
        guard.call(operator.truediv, 1, 0, timeout=60)
    assert_pool_works()


def test_result_that_cannot_be_sent_raises():
    with pytest.raises(Exception, match="pickle"):
        guard.call(threading.Lock, timeout=60)
    assert_pool_works()


def test_argument_that_cannot_be_sent_raises():
    with pytest.raises(Exception, match="pickle"):
        guard.call(len, threading.Lock(), timeout=60)
    assert_pool_works()


def test_output_of_native_code_does_not_disturb_the_protocol():
    guard.call(os.system, "echo noise; echo noise >&2", timeout=60)
    guard.call(print, "noise", timeout=60)
    assert_pool_works()


def test_stderr_of_a_crash_is_kept():
    with pytest.raises(guard.HelperDied) as caught:
        guard.call(exec, "import os; os.write(2, b'last words'); os.abort()", timeout=60)
    assert "last words" in caught.value.stderr


def test_large_arguments_and_results_pass():
    assert guard.call(bytes.upper, b"a" * 5_000_000, timeout=60) == b"A" * 5_000_000


def test_many_threads_at_once():
    found = {}

    def work(i):
        found[i] = guard.call(operator.mul, i, i, timeout=60)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: i * i for i in range(8)}


def test_crash_in_one_thread_spares_the_others():
    outcomes = {}

    def crash():
        with pytest.raises(guard.HelperDied):
            guard.call(signal.raise_signal, signal.SIGSEGV, timeout=60)
        outcomes["crash"] = True

    def work():
        outcomes["work"] = guard.call(exec, "import time; time.sleep(0.3)", timeout=60)

    threads = [threading.Thread(target=crash), threading.Thread(target=work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {"crash": True, "work": None}


def test_helper_ends_with_its_parent():
    code = "import os; from flambeau import guard; print(guard.call(os.getpid, timeout=60))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    helper = int(run.stdout)
    for _ in range(100):
        try:
            os.kill(helper, 0)
        except ProcessLookupError:
            return
        if f"{helper} (" in _stat(helper) and ") Z" in _stat(helper):
            return
        time.sleep(0.1)
    pytest.fail("the helper outlived its parent")


def _stat(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read()
    except OSError:
        return f"{pid} () Z"


def test_forked_child_uses_helpers_of_its_own():
    code = (
        "import os; from flambeau import guard\n"
        "mine = guard.call(os.getpid, timeout=60)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if guard.call(os.getpid, timeout=60) != mine else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert guard.call(os.getpid, timeout=60) == mine\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
