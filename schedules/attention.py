"""Schedules of attention, what they cost, and which is taken; AMD's are in `schedules.wave_attention`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil, inf
from typing import Any

from ladder.ir.attention import CODES, Attention, Case
from schedules import wave_attention
from schedules.schedule import Schedule, check
from schedules.wave_attention import FRAGMENTS, WaveAttentionSchedule
from targets import TileDevice

STEP_KEYS = 16
"""Keys of a matrix instruction."""

STEP_ROWS = 8
"""Rows of q (tokens times heads of a group) of a matrix instruction."""

WARP = 32

CLUSTERS = (1, 2, 4, 8)
"""Blocks of a cluster."""


@dataclass(frozen=True)
class AttentionSchedule(Schedule):
    """How one launch walks the keys.

    rows: Rows of q that a block has: 8 or 16.
    warps: Warps of a block: they take fragments of keys in turn.
    cluster: Blocks that share the keys of a head, one of `CLUSTERS`.
    fragments: Fragments of keys that a warp takes at a time.
    """

    rows: int = 8
    warps: int = 8
    cluster: int = 1
    fragments: int = 1

    def __post_init__(self) -> None:
        check(self.rows in (8, 16), f"a block has 8 or 16 rows of q, got {self.rows}")
        check(1 <= self.warps <= 16, f"a block has 1 to 16 warps, got {self.warps}")
        check(self.cluster in CLUSTERS, f"clusters have {CLUSTERS} blocks, got {self.cluster}")
        check(self.fragments in (1, 2), f"a warp takes 1 or 2 fragments at a time, got {self.fragments}")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP


LAUNCH, BLOCK, JOIN, TURN = 1.0e-6, 1.2e-6, 0.8e-6, 0.65e-6
"""Seconds: of a launch, of a block beside its turns, of joining a cluster's sums, and of a turn's first
fragment beside its bytes. Fitted to runs on an H200."""

AS_LONG = 128
"""Elements of a head of which a turn's second fragment takes as long as its first."""

CROWD = 0.67
"""How much longer a block's beginning and end take per further block on its multiprocessor."""

IN_STEP = 2.0e-6
"""Seconds that streaming takes longer per block beyond two on a multiprocessor, where all run at once: none
streams while others begin and end. Half where a warp has two fragments in flight. H200: 4.0 to 6.0 with four
blocks, 1.6 with three, 1.3 to 1.8 with four of two fragments, up to 0.4 with two."""

WAVE = 0.1e-6
"""Seconds that a multiprocessor's next blocks take to begin, where memory is what is waited for."""

BUSY = 1.0e-6
"""Seconds beside a launch in which many blocks begin and end."""

BUSY_BLOCK, BUSY_JOIN, BUSY_KEYS, BUSY_ROWS = 50e-9, 16.5e-9, 13.2e-9, 4.2e-9
"""Seconds that a multiprocessor is busy with a block, and per 16 elements of a head: with a warp's sums of 8
rows of q, with a fragment of keys, and with 8 rows of q beside it. Fitted to 227 kernels of short sequences,
on an H200 (`h200_short_attention_2026-11-30.json`), as the two below."""

BUSY_MASK: Mapping[str, float] = {"": 0.0, "bool": 10.8e-9}
"""Type of a mask -> what it adds per fragment of keys and 8 rows of q."""

BUSY_ADDED = 6.6e-9
"""The same of masks that are added."""

UNIT_SHARE = 0.019
"""Fraction of the bandwidth that one multiprocessor takes where others leave it: 2.5 of its shares."""

L2_SHARE = 2.0
"""Bandwidth of L2 over that of DRAM: rows of q beyond a block's read the same keys again."""

USABLE = {1: 1.0, 2: 1.0, 4: 0.9, 8: 0.85}
"""Blocks of a cluster -> multiprocessors that such clusters reach: they do not cross a part of the chip."""

REGISTERS, OF_CODES = 40, 35
"""Registers of a thread beside its operands and sums; more where it decodes."""

SECOND_FRAGMENT = 0.2
"""Registers per element of a head that a second fragment takes beside its keys and values."""

MOST_REGISTERS = 255
"""Registers of a thread: what is beyond is spilled."""

MOST_RESIDENT = 32
"""Blocks that a multiprocessor holds at most."""

ALONE = 16
"""Fragments in flight from which on a block leaves no registers to another on its multiprocessor."""

SPILLING: Mapping[int, float] = {256: 1.7, 192: 1.35}
"""Elements of a head from which on blocks of 16 rows of q spill, and how much longer than predicted
the blocks of 8 rows last that take their place: about the median of 24 kernels of each on an H200."""

LIBRARY, LIBRARY_MASK, LIBRARY_MASK_FEW = 6.7e-6, 0.8e-6, 5.0e-6
"""Seconds that torch's attention takes beside moving keys and values, and more with a mask: it has another
kernel then for few tokens, and positions become a mask first."""

LIBRARY_FEW = 16
"""Tokens from which on torch's attention is the same with a mask."""

LIBRARY_MASK_ROWS, LIBRARY_MASK_BLOCK, LIBRARY_MASK_BEFORE = 64, 2.1e-6, 3
"""Of torch's attention of several tokens with a mask: rows of q of a block, seconds that each block on a
multiprocessor takes at least, and how many times as long where rows of the mask are no multiple of 16 bytes
(it copies them first)."""

LIBRARY_STREAM, LIBRARY_RATE, LIBRARY_MASKED_RATE = 0.97, 0.85, 0.75
"""Fractions of sustained bandwidth, and of the sustained rate of cores, that torch's attention reaches."""

LIBRARY_ROWS, LIBRARY_STEP, LIBRARY_LEAST, LIBRARY_TURN = 128, 64, 96, 0.97
"""Of torch's attention of several tokens: rows of q of a block, multiples of elements to which it makes up
heads, elements of which smaller heads take the time, and the fraction of a core's sustained rate that a block
reaches. Each block walks all keys: 864 sizes on an H200, `h200_library_attention_2026-11-28.json`."""

LIBRARY_BLOCK = 1.8e-6
"""Seconds that each further block on a multiprocessor takes torch's attention beside its products: of short
sequences, `h200_short_attention_2026-11-30.json` (0.92 to 1.11 of the times), and of the same 864 sizes."""

LIBRARY_WIDE, LIBRARY_WIDE_HEAD, LIBRARY_WIDE_STREAM = 128, 256, 0.86
"""Elements of heads beyond which torch's attention of one token takes the time of the second number, and the
fraction of sustained bandwidth at which it reads these."""

WAYS = ((8, 1), (8, 2), (4, 2), (4, 1))
"""Warps of a block and fragments at a time that are considered."""

SHORT_WAYS, SHORT = ((2, 2), (2, 1), (1, 2), (1, 1)), 640
"""The same of blocks that share no keys, and keys up to which these were measured: few leave nothing to more
warps."""


AnySchedule = AttentionSchedule | WaveAttentionSchedule


@dataclass(frozen=True)
class Choice:
    """A schedule and what it is predicted to take, beside torch's attention; in seconds."""

    schedule: AnySchedule
    seconds: float
    library: float

    @property
    def is_torchs(self) -> bool:
        """Tell whether torch's attention is predicted to be faster."""
        return self.seconds > self.library

    @property
    def reason(self) -> str:
        """Say why."""
        return f"predicted {self.seconds * 1e6:.1f} us, torch's {self.library * 1e6:.1f} us"


def choose(form: Attention, device: TileDevice, case: Case) -> Choice:
    """Return the schedule that is predicted to be fastest for all keys, and its time for those expected."""
    predict, schedule = _VENDORS[device.vendor][1], ranked(form, device, case)[0]
    seconds = predict(form, device, schedule, expected(form, case))
    return Choice(schedule, seconds, predict_library(form, device, case))


def ranked(form: Attention, device: TileDevice, case: Case) -> list[AnySchedule]:
    """Return the schedules that are considered, the one that is predicted to be fastest first."""
    consider, predict = _VENDORS[device.vendor]
    _, tokens, _ = case
    return sorted(consider(form, device, tokens), key=lambda plan: predict(form, device, plan, case))


def next_best(
    form: Attention, device: TileDevice, schedule: AnySchedule, case: Case | None = None
) -> list[AnySchedule]:
    """Return what could take a schedule's place, the one that is predicted to be fastest first.

    Where torch's attention takes the place of what spills (on AMD GPUs), only what is predicted to be no
    slower than that. Predictions know nothing of spills.

    case: What it was chosen for; by default the first sizes among `PROBES` that it would be chosen for.
    """
    predict = _VENDORS[device.vendor][1]
    fewer = _of_rows(STEP_ROWS, device) if isinstance(schedule, AttentionSchedule) else []
    for sizes in [case] if case else product(PROBES, PROBES, PROBES):
        found, time = ranked(form, device, sizes), partial(predict, form, device)
        if found[0] != schedule:
            continue
        found += sorted(set(fewer).difference(found), key=lambda plan: time(plan, sizes))
        if device.vendor == "amd":
            most = predict_library(form, device, sizes)
            found = [plan for plan in found if time(plan, expected(form, sizes)) <= most]
        if others := [plan for plan in found if plan != schedule]:
            return others
    return []


def expected(form: Attention, case: Case) -> Case:
    """Return a case with the keys that kernels read in the mean while a cache fills: up to the position."""
    batch, tokens, keys = case
    return batch, tokens, -(-keys // 2) if form.position else keys


PROBES = (1, 8, 64, 512, 2048, 8192)
"""Value of an open size where schedules are chosen before it is known."""

SERVING = 4
"""Kernels of one attention of open sizes at most."""


def serving(form: Attention, device: TileDevice, cases: Iterable[Case]) -> list[AnySchedule]:
    """Return schedules for several sizes: those chosen most often where ours is not slower than torch's."""
    choices = (choose(form, device, case) for case in cases)
    wins = Counter(choice.schedule for choice in choices if not choice.is_torchs)
    return [schedule for schedule, _ in wins.most_common(SERVING)]


def best(form: Attention, device: TileDevice, among: Sequence[AnySchedule], case: Case) -> int | None:
    """Return which schedule is predicted to be fastest; None where torch's attention is."""
    predict = _VENDORS[device.vendor][1]
    first = min(range(len(among)), key=lambda at: predict(form, device, among[at], case))
    seconds = predict(form, device, among[first], expected(form, case))
    return first if seconds <= predict_library(form, device, case) else None


def schedules(form: Attention, device: TileDevice, tokens: int) -> list[AttentionSchedule]:
    """Return the schedules that are considered."""
    return _of_rows(STEP_ROWS if tokens * form.group <= STEP_ROWS else 2 * STEP_ROWS, device)


def _of_rows(rows: int, device: TileDevice) -> list[AttentionSchedule]:
    """Return the schedules of blocks of so many rows of q."""
    clusters = CLUSTERS if "cluster" in device.features else (1,)
    ways = [(*way, cluster) for cluster in clusters for way in WAYS] + [(*way, 1) for way in SHORT_WAYS]
    return [AttentionSchedule(rows, w, c, f) for w, f, c in ways if f * rows <= 2 * STEP_ROWS]


def registers(form: Attention, plan: AttentionSchedule) -> int:
    """Return about how many registers a thread has: sums, q, keys and values in flight."""
    rows = plan.rows // STEP_ROWS
    moved = 2 * plan.fragments * STEP_KEYS * form.width * form.stored_bytes // WARP // 4
    own = rows * (form.width // 4 + form.width // 8)
    second = int(SECOND_FRAGMENT * form.width) * (plan.fragments - 1)
    wanted = own + moved + second + REGISTERS * rows + (OF_CODES if form.stored in CODES else 0)
    return min(wanted, MOST_REGISTERS)


def resident(form: Attention, device: TileDevice, plan: AttentionSchedule) -> int:
    """Return the blocks that a multiprocessor holds."""
    if plan.warps * plan.fragments >= ALONE:
        return 1
    by_registers = device.registers_per_unit // (registers(form, plan) * plan.threads)
    return max(1, min(by_registers, device.max_threads_per_unit // plan.threads, MOST_RESIDENT))


def predict(form: Attention, device: TileDevice, plan: AttentionSchedule, case: Case) -> float:
    """Return the seconds that a schedule is predicted to take; infinity where its like was never measured."""
    batch, tokens, keys = case
    if keys > SHORT and (plan.warps, plan.fragments) in SHORT_WAYS:
        return inf
    bandwidth = device.layers[0].sustained_bandwidth
    tiles = ceil(tokens * form.group / plan.rows)
    blocks = batch * form.kv_heads * tiles * plan.cluster
    held = resident(form, device, plan)
    units = max(1, int(device.units * USABLE[plan.cluster]))
    waves = ceil(blocks / (units * held))
    # Blocks of a cluster fill a multiprocessor before the next; others spread.
    together = min(held, ceil(min(blocks, units * held) / units) if plan.cluster == 1 else blocks)
    nbytes = plan.warps * plan.fragments * STEP_KEYS * 2 * form.size * form.stored_bytes
    turns = ceil(keys / (STEP_KEYS * plan.fragments * plan.warps * plan.cluster))
    fragments = 1 + (plan.fragments - 1) * form.size / AS_LONG
    turn = TURN * fragments + together * nbytes / (bandwidth * UNIT_SHARE)
    moved = blocks * turns * nbytes
    streamed = max(moved / tiles, moved / L2_SHARE) / bandwidth
    block = BLOCK * (1 + CROWD * (together - 1))
    at_once = blocks // plan.cluster <= units * held
    in_step = IN_STEP * max(0, together - 2) / plan.fragments if at_once else 0.0
    if plan.cluster == 1:  # multiprocessors take the next block as soon as one ends
        first = block + turns * turn if waves == 1 else BLOCK + turns * TURN * fragments
        busy = BUSY + blocks / units * _busy(form, plan, turns)
        walked = max(first, BLOCK + streamed + in_step, busy)
    else:
        walked = max(waves * (block + turns * turn), BLOCK + streamed + in_step)
    if plan.rows > STEP_ROWS:
        walked *= next((longer for size, longer in SPILLING.items() if form.size >= size), 1.0)
    return LAUNCH + walked + WAVE * waves + (JOIN if plan.cluster > 1 else 0.0)


def _busy(form: Attention, plan: AttentionSchedule, turns: int) -> float:
    """Return the seconds that a multiprocessor is busy with a block."""
    rows, steps, fragments = plan.rows / STEP_ROWS, form.width / STEP_KEYS, turns * plan.fragments
    masked = BUSY_MASK.get(form.mask, BUSY_ADDED) * rows
    each = (BUSY_KEYS + BUSY_ROWS * rows) * steps + masked
    return BUSY_BLOCK + plan.warps * (BUSY_JOIN * rows * steps + fragments * each)


def predict_library(form: Attention, device: TileDevice, case: Case) -> float:
    """Return the seconds that torch's attention is predicted to take; codes are decoded before."""
    batch, tokens, keys = case
    bandwidth = device.layers[0].sustained_bandwidth
    plain = 4 * batch * form.kv_heads * keys * form.size
    decode = (form.keys_bytes(batch, keys) + plain) / bandwidth if form.stored in CODES else 0.0
    flops = 4 * batch * form.heads * tokens * (keys / 2 if form.causal else keys) * form.size
    reading, products = plain / bandwidth / LIBRARY_STREAM, flops / (_unit_rate(form, device) * device.units)
    masked = 0.0
    if form.mask or form.position:
        masked = LIBRARY_MASK_FEW if form.position or tokens < LIBRARY_FEW else LIBRARY_MASK
    if masked or device.vendor == "amd":  # nothing was measured
        walked = max(reading, products / LIBRARY_MASKED_RATE)
        if tokens > 1 and device.vendor != "amd":
            blocks = batch * form.heads * ceil(tokens / LIBRARY_MASK_ROWS) / device.units
            aligned = keys * 2 % 16 == 0
            walked = max(walked, blocks * LIBRARY_MASK_BLOCK * (1 if aligned else LIBRARY_MASK_BEFORE))
    elif tokens == 1:
        wide = LIBRARY_WIDE_HEAD / form.size * plain / bandwidth / LIBRARY_WIDE_STREAM
        walked = wide if form.size > LIBRARY_WIDE else reading
    else:
        walked = max(reading, products / LIBRARY_RATE, _library_turns(form, device, case))
    return LIBRARY + masked + decode + walked


def _unit_rate(form: Attention, device: TileDevice) -> float:
    """Return the sustained operations per second of a multiprocessor."""
    core = device.core_for(form.ttype)
    return core.ops_per_cycle * device.clock * core.sustained


def _library_turns(form: Attention, device: TileDevice, case: Case) -> float:
    """Return the seconds in which the blocks of torch's attention walk the keys: none shares them."""
    batch, tokens, keys = case
    size = max(LIBRARY_LEAST, -(-form.size // LIBRARY_STEP) * LIBRARY_STEP)
    seen = min(keys, tokens) if form.causal else keys
    rounds = ceil(batch * form.heads * ceil(tokens / LIBRARY_ROWS) / device.units)
    products = seen * 4 * LIBRARY_ROWS * size / (_unit_rate(form, device) * LIBRARY_TURN)
    return rounds * products + LIBRARY_BLOCK * (rounds - 1)


_VENDORS: Mapping[str, tuple[Callable[..., list[Any]], Callable[..., float]]] = {
    "nvidia": (schedules, predict),
    "amd": (wave_attention.schedules, wave_attention.predict),
}
"""Vendor -> the schedules that are considered for some tokens, and the prediction of what one takes."""


CAPABILITY = (8, 0)
"""Lowest compute capability that our kernels run on."""


def is_nvidia(device: TileDevice | None) -> bool:
    """Tell whether a device is an NVIDIA GPU that our kernels run on."""
    return device is not None and device.kind == "cuda" and device.compute_capability >= CAPABILITY


def has_kernels(device: TileDevice | None) -> bool:
    """Tell whether attention has kernels of ours on a device."""
    return is_nvidia(device) or (device is not None and not device.features.isdisjoint(FRAGMENTS))
