"""The loop nest of a chain on GPUs, as its `Mapping` says and a `Dialect` spells it.

Inputs whose memory runs along another axis than the result's are transposed in shared memory
(`shared_transpose`). Threads that work alone take vectors of neighbouring elements of any row
(`gpu_vectors`); sums over image positions have blocks of their own (`spatial_sums`); else teams of lanes take
rows (`gpu_rows`).
"""

from __future__ import annotations

from ladder.lower.chain.cuda import CudaDialect
from ladder.lower.chain.dialect import Dialect
from ladder.lower.chain.gpu_nest import GpuNest
from ladder.lower.chain.gpu_rows import RowLoops
from ladder.lower.chain.gpu_vectors import VectorLoops
from ladder.lower.chain.rocm import RocmDialect
from ladder.lower.chain.scatter import Chain
from ladder.lower.chain.shared_transpose import emit_tiles
from ladder.lower.chain.spatial_sums import SpatialSums
from ladder.movement.mapping import Mapping

DIALECTS: dict[str, type[Dialect]] = {"cuda": CudaDialect, "rocm": RocmDialect}
"""Target kind -> how kernels for it are written."""


class GpuChain:
    """One kernel of a chain; parameters as `GpuNest`."""

    def __init__(self, chain: Chain, dialect: Dialect, mapping: Mapping, cheap: bool = False) -> None:
        self.nest = GpuNest(chain, dialect, mapping, cheap)

    def emit(self) -> None:
        """Emit the whole kernel."""
        nest = self.nest
        if nest.mapping.tile[0]:
            emit_tiles(nest)
        elif nest.lanes == 1:
            VectorLoops(nest).emit()
        elif (sums := SpatialSums.of(nest)) is not None:
            sums.emit()
        else:
            RowLoops(nest).emit()
