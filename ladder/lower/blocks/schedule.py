"""Schedule of a block graph: division of its work over warps, pipeline stages and clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schedules.schedule import check
from targets import TileDevice

LEAST: Mapping[str, int] = {
    "groups": 1, "row_warps": 1, "stages": 1, "cluster": 1, "column_warps": 1, "lead": 0,
}  # fmt: skip
"""Field -> its least value."""

WORDS: Mapping[str, tuple[str, ...]] = {
    "copies": ("lanes", "tensor"),
    "release": ("begin", "asked", "end", "never"),
    "products": ("mma", "wgmma"),
}
"""Field -> its values."""


@dataclass(frozen=True)
class BlockSchedule:
    """Division of a block graph's work.

    groups: Groups of warps. Group i takes steps i, i + groups x cluster, ... of the loop, with copies,
        buffers and accumulators of its own; accumulators are joined afterwards.
    row_warps, column_warps: Warps of a group, their product: they share its tiles and split the rows and
        columns of what they accumulate.
    stages: Steps whose tiles a group holds in shared memory, those under way included.
    cluster: Blocks that share a loop: each takes its part of the steps, accumulators are joined through
        distributed shared memory.
    copies: ``"lanes"``: the lanes of a group copy 16 bytes each (cp.async). ``"tensor"``: one lane copies
        whole tiles through tensor maps (from sm_90 on), whose arrival barriers in shared memory count.
    release: When the next kernel may start: at the ``"begin"`` of this one, when the last tiles have been
        asked for (``"asked"``), at the ``"end"`` of its loop, or ``"never"`` before it has ended. Devices
        that launch no kernel early take ``"begin"``.
    lead: Steps by which the next kernel may start before ``"asked"``.
    products: ``"mma"``: by warps. ``"wgmma"``: by warpgroups, of tiles that tensor copies put into shared
        memory.
    """

    groups: int = 1
    row_warps: int = 1
    stages: int = 2
    cluster: int = 1
    column_warps: int = 1
    copies: str = "lanes"
    release: str = "begin"
    lead: int = 0
    products: str = "mma"

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            check(value >= least, f"{name} must be at least {least}, got {value}")
        for name, words in WORDS.items():
            value = getattr(self, name)
            check(value in words, f"{name}={value!r} is not one of {', '.join(words)}")
        check(not self.lead or self.release == "asked", f"lead={self.lead} goes with release='asked'")

    @property
    def group_warps(self) -> int:
        """Warps of a group."""
        return self.row_warps * self.column_warps

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.groups * self.group_warps

    @property
    def sharers(self) -> int:
        """Groups that share a loop, over all blocks of a cluster."""
        return self.groups * self.cluster


def releases_of(device: TileDevice) -> Sequence[str]:
    """Return when a kernel may let the next one start: a choice only on devices that launch kernels early."""
    return WORDS["release"] if "pdl" in device.features else ("begin",)
