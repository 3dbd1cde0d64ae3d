"""What IREE can compile for, as data."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import TargetError


@dataclass(frozen=True)
class Target:
    """One kind of machine.

    `device` is IREE's driver name where programs have worker threads, `inline_device` the one
    that runs them on the calling thread.
    """

    name: str
    device: str
    inline_device: str
    flags: tuple[str, ...]

    @staticmethod
    def parse(target: str | Target) -> Target:
        """The target of that name. Raises TargetError for an unknown one."""
        if isinstance(target, Target):
            return target
        if target not in TARGETS:
            known = ", ".join(sorted(TARGETS))
            raise TargetError(f"unknown target {target!r}; the known ones: {known}")
        return TARGETS[target]


_COMMON_FLAGS = (
    "--iree-input-type=auto",
    "--iree-opt-level=O3",
    "--iree-input-demote-f64-to-f32=false",
)

TARGETS = {
    target.name: target
    for target in (
        Target(
            "llvm-cpu",
            device="local-task",
            inline_device="local-sync",
            flags=(
                *_COMMON_FLAGS,
                "--iree-hal-target-backends=llvm-cpu",
                "--iree-llvmcpu-target-cpu=host",
                # Weights are constants of a session: packed once, when it is made.
                "--iree-opt-data-tiling",
                "--iree-dispatch-creation-data-tiling",
                "--iree-global-opt-use-im2col-for-convs",
                # As generic ops, contractions over a gather's rows are packed wrongly: silently.
                "--iree-opt-generalize-matmul=false",
                # The default of 32 KiB is overrun by GPT-2, ViT and Whisper.
                "--iree-llvmcpu-stack-allocation-limit=1048576",
            ),
        ),
    )
}
