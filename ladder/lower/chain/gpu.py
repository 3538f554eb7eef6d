"""The loop nest of a chain on GPUs, as its `Mapping` says and a `Dialect` spells it.

What lies in memory along another axis than the result goes through shared memory (`exchange`). Threads alone
take vectors of neighbouring elements of any row (`gpu_vectors`); means over images have blocks of their own
(`means`); else teams of lanes take rows (`gpu_rows`).
"""

from __future__ import annotations

from ladder.lower.chain.dialect import Dialect
from ladder.lower.chain.exchange import emit_tiles
from ladder.lower.chain.gpu_nest import GpuNest
from ladder.lower.chain.gpu_rows import RowLoops
from ladder.lower.chain.gpu_vectors import VectorLoops
from ladder.lower.chain.means import Means
from ladder.lower.chain.puts import Chain
from ladder.movement.mapping import Mapping


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
        elif (means := Means.of(nest)) is not None:
            means.emit()
        else:
            RowLoops(nest).emit()
