"""An executable with its weights, ready to be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import iree.runtime as rt
import numpy as np

from .compiler import Executable
from .targets import Target

SCOPE = "model"

# The binding holds module-level state until the interpreter is gone and would complain about it.
rt._binding.disable_leak_checker()


@cache
def _instance() -> rt.VmInstance:
    return rt.VmInstance()


@cache
def _device(driver: str, threads: int) -> rt.HalDevice:
    rt.flags.parse_flags(f"--task_topology_group_count={max(threads, 1)}")
    # A cached driver would keep the thread count that it was made with.
    return rt._binding.create_hal_driver(driver).create_default_device()


class Program:
    """An executable, loaded once for every session that runs it.

    `written` are the positions of the arguments that it changes in place, where they lie.
    """

    def __init__(self, executable: Executable, target: Target):
        self.written = tuple(i for i, transfer in executable.written.items() if not transfer)
        self._private = frozenset(executable.written) - frozenset(self.written)
        self._target = target
        self._results = executable.results
        self._module = rt.VmModule.copy_buffer(_instance(), executable.code)

    def bind(self, weights: Mapping[str, memoryview], threads: int) -> Session:
        """A session over these weights: flat bytes in row-major order, by key.

        They are used where they lie, except those that IREE packs for its kernels, which
        happens here. `threads` workers run it; none does with 0, only the calling thread.
        """
        driver = self._target.device if threads else self._target.inline_device
        device = _device(driver, threads)
        modules = [rt.create_hal_module(_instance(), device), self._module]
        if weights:
            index = rt.ParameterIndex()
            for key, data in weights.items():
                index.add_buffer(key, data)
            provider = index.create_provider(scope=SCOPE)
            modules.insert(0, rt.create_io_parameters_module(_instance(), provider))
        context = rt.VmContext(_instance(), modules)
        function = self._module.lookup_function("main")
        return Session(context, function, device, self._results, self._private)


class Session:
    """One program bound to its weights. Any number of threads may call it at once."""

    __slots__ = ("_capsule", "_device", "_function", "_import", "_invoke", "_private", "_results")

    def __init__(
        self,
        context: rt.VmContext,
        function: rt.VmFunction,
        device: rt.HalDevice,
        results: int,
        private: frozenset[int],
    ):
        self._device = device
        self._private = private
        self._invoke = context.invoke
        self._function = function
        self._results = results
        self._import = device.from_dlpack_capsule
        self._capsule = device.create_dlpack_capsule

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """Run the program.

        Arguments are DLPack capsules of dense row-major tensors at 64-byte boundaries, ints and
        floats; results are DLPack capsules.
        """
        inputs = rt.VmVariantList(len(arguments))
        for position, argument in enumerate(arguments):
            if position in self._private:
                inputs.push_ref(self._copy(self._import(argument)))
            elif type(argument) is int:
                inputs.push_int(argument)
            elif type(argument) is float:
                inputs.push_float(argument)
            else:
                inputs.push_ref(self._import(argument))
        outputs = rt.VmVariantList(self._results)
        self._invoke(self._function, inputs, outputs)
        results = []
        for i in range(self._results):
            view = outputs.get_as_object(i, rt.HalBufferView)
            results.append(self._capsule(view, 1, 0))
        return results

    def _copy(self, view: rt.HalBufferView) -> rt.HalBufferView:
        """A copy in a buffer of IREE's own, which allows every kind of write."""
        data = view.map().asarray((view.byte_length,), np.dtype(np.uint8))
        buffer = self._device.allocator.allocate_buffer_copy(
            int(rt.MemoryType.DEVICE_LOCAL | rt.MemoryType.HOST_VISIBLE),
            int(rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING),
            self._device,
            data,
        )
        return rt.HalBufferView(buffer, view.shape, view.element_type)
