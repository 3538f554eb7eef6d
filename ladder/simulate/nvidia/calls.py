"""All tables of NVIDIA calls together."""

from __future__ import annotations

from ladder.simulate.nvidia import copies, helpers, ptx, stream, tcgen05, tcgen05_scaled, wgmma
from ladder.simulate.translate import Calls

CALLS = Calls(
    reads={**ptx.READS, "ladder.workspace": stream.allocate},
    steps={**ptx.STEPS, **copies.STEPS, **wgmma.STEPS, **tcgen05.STEPS, **tcgen05_scaled.STEPS},
    stops=ptx.STOPS,
    helpers=helpers.translate,
)
