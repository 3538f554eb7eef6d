"""The loop nest of a chain on GPUs, as its `Mapping` says and a `Dialect` spells it.

Inputs whose memory runs along another axis than the result's are transposed in shared memory
(`shared_transpose`). Threads that work alone take vectors of neighbouring elements of any row
(`VectorLoops`); reductions along axes before the last take blocks of neighbouring columns
(`column_reductions`), scans along these parts of columns (`column_scans`); else teams of lanes take rows
(`gpu_rows`).
"""

from __future__ import annotations

from ladder.lower.chain.bins import Bins, bin_blocks
from ladder.lower.chain.column_reductions import ColumnReductions
from ladder.lower.chain.column_scans import ColumnScans, scans_columns
from ladder.lower.chain.cuda import CudaDialect
from ladder.lower.chain.dialect import Dialect
from ladder.lower.chain.gpu_nest import GpuNest
from ladder.lower.chain.gpu_rows import RowLoops
from ladder.lower.chain.rocm import RocmDialect
from ladder.lower.chain.scatter import Chain
from ladder.lower.chain.shared_transpose import emit_tiles
from ladder.lower.chain.vector_loops import VectorLoops
from ladder.movement.mapping import Mapping

DIALECTS: dict[str, type[Dialect]] = {"cuda": CudaDialect, "rocm": RocmDialect}
"""Target kind -> how kernels for it are written."""


class GpuChain:
    """One kernel of a chain; parameters as `GpuNest`."""

    def __init__(self, chain: Chain, dialect: Dialect, mapping: Mapping, cheap: bool = False) -> None:
        self.blocks = bin_blocks(chain, dialect.device)
        self.nest = GpuNest(chain, dialect, Mapping() if self.blocks else mapping, cheap)

    def emit(self) -> None:
        nest = self.nest
        if self.blocks:
            Bins(nest, self.blocks).emit()
        elif nest.mapping.tile[0]:
            emit_tiles(nest)
        elif nest.lanes == 1:
            VectorLoops(nest).emit()
        elif nest.mapping.across:
            (ColumnScans if scans_columns(nest.graph) else ColumnReductions)(nest).emit()
        else:
            RowLoops(nest).emit()
        nest.dialect.finish()
