"""Schedules of attention for few query tokens, what they cost, and which is taken."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ladder.ir.attention import CODES, Attention
from schedules.schedule import Schedule, check
from targets import TileDevice

FRAGMENT = 16
"""Keys of a matrix instruction."""

STEP_ROWS = 8
"""Rows of q (tokens times heads of a group) of a matrix instruction."""

WARP = 32

CLUSTERS = (1, 2, 4, 8, 16)
"""Blocks of a cluster."""


@dataclass(frozen=True)
class AttentionSchedule(Schedule):
    """How one launch walks the keys.

    Parameters
    ----------
    rows
        Rows of q that a block has: 8 or 16.
    warps
        Warps of a block: they take fragments of keys in turn.
    cluster
        Blocks that share the keys of a head, 1 to 16 (more than 8 not on every chip of an architecture).
    fragments
        Fragments of keys that a warp takes at a time.
    resident
        Blocks that a multiprocessor must be able to hold: limits registers.
    """

    rows: int = 8
    warps: int = 8
    cluster: int = 1
    fragments: int = 1
    resident: int = 1

    def __post_init__(self) -> None:
        check(self.rows in (8, 16), f"a block has 8 or 16 rows of q, got {self.rows}")
        check(1 <= self.warps <= 16, f"a block has 1 to 16 warps, got {self.warps}")
        check(self.cluster in CLUSTERS, f"clusters have {CLUSTERS} blocks, got {self.cluster}")
        check(self.fragments in (1, 2), f"a warp takes 1 or 2 fragments at a time, got {self.fragments}")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP


LAUNCH, WALK, JOIN = 1.6e-6, 1.4e-6, 0.6e-6
"""Seconds: of an overlapped launch, from the first load to the last sum, of a cluster's exchange."""

OWN_SHARE = 1.8
"""How much more than its share of the bandwidth a multiprocessor can take where others are idle."""

LIBRARY = 5.0e-6
"""Seconds that torch's attention takes at least: it joins parts of the keys in a second launch."""

LIBRARY_STREAM, LIBRARY_RATE = 0.8, 0.75
"""Fractions of sustained bandwidth, and of the rate of cores, that torch's attention reaches."""


@dataclass(frozen=True)
class Choice:
    """A schedule and what it is predicted to take, beside torch's attention; in seconds."""

    schedule: AttentionSchedule
    seconds: float
    library: float

    @property
    def reason(self) -> str:
        """Say why."""
        return f"predicted {self.seconds * 1e6:.1f} us, torch's {self.library * 1e6:.1f} us"


def choose(form: Attention, device: TileDevice, batch: int, tokens: int, keys: int) -> Choice:
    """Return the schedule that is predicted to be fastest."""
    options = schedules(form, device, tokens)
    seconds = [predict(form, device, plan, batch, tokens, keys) for plan in options]
    best = min(range(len(options)), key=seconds.__getitem__)
    return Choice(options[best], seconds[best], predict_library(form, device, batch, tokens, keys))


def schedules(form: Attention, device: TileDevice, tokens: int) -> list[AttentionSchedule]:
    """Return the schedules that a device can run."""
    rows = STEP_ROWS if tokens * form.group <= STEP_ROWS else 2 * STEP_ROWS
    clusters = CLUSTERS[:-1] if "cluster" in device.features else (1,)
    return [AttentionSchedule(rows, warps, cluster) for cluster in clusters for warps in (4, 8)]


def predict(
    form: Attention, device: TileDevice, plan: AttentionSchedule, batch: int, tokens: int, keys: int
) -> float:
    """Return the seconds that a schedule is predicted to take."""
    dram = device.layers[0]
    bandwidth = dram.bandwidth * dram.sustained
    tiles = ceil(tokens * form.group / plan.rows)
    heads = batch * form.kv_heads * tiles
    blocks = heads * plan.cluster
    nbytes = form.keys_bytes(batch, keys) * tiles
    per_unit = ceil(blocks / device.units) * nbytes / blocks
    stream = max(nbytes / bandwidth, per_unit * device.units / bandwidth / OWN_SHARE)
    turns = ceil(keys / (FRAGMENT * plan.fragments * plan.warps * plan.cluster))
    return LAUNCH + WALK + JOIN * (plan.cluster > 1) + stream + 0.1e-6 * turns


def predict_library(form: Attention, device: TileDevice, batch: int, tokens: int, keys: int) -> float:
    """Return the seconds that torch's attention is predicted to take; codes are decoded before."""
    dram = device.layers[0]
    bandwidth = dram.bandwidth * dram.sustained * LIBRARY_STREAM
    decode = 2 * form.keys_bytes(batch, keys) / bandwidth if form.stored in CODES else 0.0
    stream = 4 * batch * form.kv_heads * keys * form.size / bandwidth + decode
    seen = keys / 2 if form.causal else keys
    flops = 4 * batch * form.heads * tokens * seen * form.size
    core = device.core_for(form.ttype)
    rate = core.ops_per_cycle * device.units * device.clock * LIBRARY_RATE
    return LIBRARY + max(stream, flops / rate)
