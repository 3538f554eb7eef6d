"""Block graphs of the superoptimizer as kernels.

`analysis` lays a block graph open, `geometry` sizes it (`layouts` and `allocate` place its tiles exactly,
`order` its barriers), `kernel` emits CUDA out of `values`. Takes `ladder.ir` graphs only.
"""

from __future__ import annotations

from ladder.lower.blocks.schedule import BlockSchedule

__all__ = ["BlockSchedule"]
