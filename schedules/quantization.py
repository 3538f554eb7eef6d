"""Quantizing kernels of dynamic activations: which threads hold which elements of a row of x."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ladder.ir.gemm import require_quantizable
from schedules.schedule import check
from tile_types import get_type

CHUNK = 8
"""Neighbouring elements that a thread takes at a time: 8 bytes of codes."""

WARP = 32

STEP_WARPS = 2
"""Warps by which blocks grow with K: few different kernels, few idle threads."""


@dataclass(frozen=True)
class Quantization:
    """Problem and tiles of a quantising kernel.

    source: Element type of x, of `ITEM_BYTES`.
    activation: ``"int8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
    group: Elements along K that share a scale: 0 for a whole row, else `CHUNK` times a power of two, at most
        256.
    threads: Threads per row, a multiple of 32.
    chunks: Chunks that a thread keeps in registers.
    """

    source: str
    activation: str
    group: int = 0
    threads: int = 128
    chunks: int = 4

    def __post_init__(self) -> None:
        require_quantizable(self.source)
        check(
            self.threads % WARP == 0 and WARP <= self.threads <= 1024,
            f"a row takes 1 to 32 whole warps, got {self.threads} threads",
        )
        lanes = self.group // CHUNK
        check(
            self.group % CHUNK == 0 and lanes <= WARP and lanes & (lanes - 1) == 0,
            f"a group is {CHUNK} elements times a power of two up to {WARP}, got {self.group}",
        )

    @property
    def limit(self) -> float:
        """Largest magnitude of a code; int8 leaves -128 out, so that -x has minus the codes of x."""
        return 127.0 if self.activation == "int8" else get_type(self.activation).max_abs


@dataclass(frozen=True)
class Tiling:
    """Threads and registers for the rows of a vendor's kernels.

    chunks: Chunks that a thread may keep, fewest first.
    comfortable: Threads beyond which more chunks are better than more threads.
    most, most_grouped: Threads at most, of whole rows and of groups.
    """

    chunks: tuple[int, ...]
    comfortable: int
    most: int
    most_grouped: int


TILINGS: Mapping[str, Tiling] = {
    # Measured on an H200 for K = 4096 ... 28672 and M = 1 ... 4096.
    "nvidia": Tiling((2, 4), 512, 1024, 512),
    # TVM marks AMD kernels as having at most 256 threads.
    "amd": Tiling((2, 4, 8), 256, 256, 256),
}


def tiled(source: str, activation: str, group: int, k: int, vendor: str = "nvidia") -> Quantization:
    """Return the quantisation whose threads hold a row of ``k`` elements and little more.

    Groups need one chunk per thread.
    """
    return tilings(source, activation, group, k, vendor)[0]


def tilings(
    source: str, activation: str, group: int, k: int, vendor: str = "nvidia"
) -> tuple[Quantization, ...]:
    """Return the quantisation that `tiled` does, then those whose threads keep fewer chunks of a row."""
    tiling = TILINGS[vendor]
    fitting = (c for c in tiling.chunks if k <= c * CHUNK * tiling.comfortable)
    held = 1 if group else next(fitting, tiling.chunks[-1])
    step = WARP * STEP_WARPS
    most = tiling.most_grouped if group else tiling.most

    def of_chunks(chunks: int) -> Quantization:
        threads = -(-k // (CHUNK * chunks * step)) * step
        return Quantization(source, activation, group, min(threads, most), chunks)

    return (of_chunks(held), *(of_chunks(fewer) for fewer in reversed(tiling.chunks) if fewer < held))
