"""Settings of the whole process: `flambeau.config.compile_timeout = 60`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Config:
    """What may be changed at run time; each setting takes effect at the next compilation."""

    compile_timeout: float = 600.0
    """Seconds that one native compilation may take before it is stopped."""

    reproducer_dir: Path | None = None
    """Where reproducers of failed compilations go; None: in the system's temporary folder."""

    check_indices: bool = True
    """Whether programs check indices as eager does; without, one out of range reads anything."""

    tiny_program_flops: int = 1_000_000
    """Programs of fewer operations than this run on the calling thread, without workers."""


config = Config()
