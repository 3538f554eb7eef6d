"""Programmatic dependent launch: a kernel's set-up runs while the kernel before it finishes.

From compute capability 9.0 on (PTX ISA, "griddepcontrol"; CUDA programming guide, "Programmatic
Dependent Launch and Synchronization"). Until `Overlap.wait` the kernel before may still write
anything, weights included: only prefetches into L2 may come earlier. Every thread that reads or
writes global memory must have waited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ladder.lower import Expr
from ladder.lower import builder as b
from targets import TileDevice


class Prologue(Protocol):
    """A prologue of a kernel being emitted; its arguments are declared."""

    @property
    def columns(self) -> int:
        """Elements of an activation row."""

    @property
    def nbytes(self) -> int:
        """Shared memory of a block."""

    def prefetch(self, first: Expr, thread: Expr) -> None:
        """Bring small inputs into L2 while the kernel before may still run; by the ``first`` block."""

    def allocate(self, pool: Any) -> Any:
        """Return shared memory for the activation rows."""

    def emit(self, first: Expr, thread: Expr) -> None:
        """Compute all rows; the block may read them afterwards.

        first: Whether this block stores what else is computed.
        thread: This thread of the block.
        """


EARLY_LAUNCH = "tirx.use_programtic_dependent_launch"
"""TVM's launch flag, spelled as TVM spells it (tvm/src/runtime/metadata.h)."""

DYNAMIC_SHARED = "tirx.use_dyn_shared_memory"
"""TVM's launch parameter for the bytes of dynamic shared memory; it must come last."""


@dataclass(frozen=True)
class Overlap:
    """Emits what overlapping launches need, or nothing on devices that cannot."""

    device: TileDevice

    @property
    def possible(self) -> bool:
        """Whether the device launches kernels early."""
        return "pdl" in self.device.features

    def declare(self, axes: int = 1, cluster: int = 1, shared: bool = True) -> None:
        """Ask for an early launch; call it before `ladder.lower.builder.device`.

        axes: Of the grid.
        cluster: Blocks of a cluster.
        shared: Whether the kernel uses dynamic shared memory.
        """
        if self.possible:
            grid = [f"blockIdx.{axis}" for axis in "xyz"[:axes]]
            extents = [*grid, *["clusterCtaIdx.x"] * (cluster > 1), "threadIdx.x"]
            last = [DYNAMIC_SHARED] * shared
            b.function_attribute("tirx.kernel_launch_params", [*extents, EARLY_LAUNCH, *last])

    def release(self) -> None:
        """Let the next kernel start once all blocks of this one have come here or ended."""
        if self.possible:
            b.ptx("griddepcontrol.launch_dependents")

    def wait(self) -> None:
        """Wait until the kernels before have ended and what they wrote is visible."""
        if self.possible:
            b.ptx("griddepcontrol.wait")
