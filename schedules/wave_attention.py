"""Schedules of attention on AMD GPUs: how the waves of a block share rows of q and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from ladder.ir.attention import CODES, Attention, Case, head_problem
from schedules.attention_rows import Piece, divide
from schedules.schedule import Schedule, check, passes
from schedules.waves import MOST_THREADS
from targets import TileDevice
from tile_types.errors import ScheduleError

SIDE = 16
"""Rows of a matrix instruction's result, keys or elements of a head, and its columns, rows of q."""

MOST_REGISTERS = 256
"""Registers of a lane up to which two waves share a SIMD of CDNA, and all that RDNA has."""


@dataclass(frozen=True)
class Fragment:
    """What the lanes of a wave hold of a fragment of 16 rows and 16 columns.

    lanes: Of a wave.
    operands: How many lanes must hold the same part of an operand of a matrix instruction.
    registers: Of a lane.
    spare: Registers besides those that are counted: of a kernel, of a fragment of keys, and of a fragment of
        scores (compiled).
    codes: More of them, of a kernel and of a fragment of keys, where K and V are codes with scales.
    cycles: Of a wave's vector instruction: SIMDs of CDNA have 16 lanes, those of RDNA 32.
    """

    lanes: int
    operands: int
    registers: int
    spare: tuple[int, int, int]
    codes: tuple[int, int]
    cycles: int

    @property
    def groups(self) -> int:
        """Groups of 16 lanes: each has other keys of a fragment, and another part of a head."""
        return self.lanes // SIDE

    @property
    def run(self) -> int:
        """Neighbouring keys of a score's column that a lane holds, and rows of a column of sums."""
        return SIDE // self.groups


FRAGMENTS: Mapping[str, Fragment] = {
    "mfma": Fragment(64, 1, 512, (40, 10, 6), (0, 0), 4),
    "wmma": Fragment(32, 2, 256, (19, 11, 25), (13, 16), 1),
    "wmma.split": Fragment(32, 1, 256, (19, 11, 25), (13, 16), 1),
}
"""Feature of a device -> fragments of its matrix cores."""


def fragment_of(device: TileDevice) -> Fragment:
    """Return the fragments of a device's matrix cores.

    Raises ScheduleError if it has none that attention is written for.
    """
    for feature, found in FRAGMENTS.items():
        if feature in device.features:
            return found
    raise ScheduleError(f"{device.name} has no matrix cores that attention is written for")


def pieces(form: Attention, lanes: int, narrow: bool = False) -> tuple[Piece, ...]:
    """Return what each of the lanes that share a key or a value loads at once of it.

    narrow: Whether all loads are as narrow as the narrowest.
    """
    width = form.stored_bytes
    found = divide(form.width, lanes, width, width)
    return divide(form.width, lanes, width, width, found[-1].elements * width) if narrow else found


ROOMY = 0.95
"""Share of `MOST_REGISTERS` up to which loads are as wide as rows allow; LLVM spilled beyond (gfx1201)."""


def loads_narrowly(form: Attention, device: TileDevice, plan: WaveAttentionSchedule) -> bool:
    """Whether registers are so few that wide loads, which hold several at once, do not fit."""
    return registers(form, device, plan) > ROOMY * MOST_REGISTERS


PAD, STATE = 4, 2
"""float32 between rows of sums in LDS, so that lanes of different rows use different banks; and of a row's
largest score and sum of weights."""


@dataclass(frozen=True)
class WaveAttentionSchedule(Schedule):
    """How one launch walks the keys.

    parts: Fragments of 16 rows of q (tokens times heads of a group) of a wave: 1 or 2.
    row_waves: Waves of a block that have rows of their own.
    key_waves: Waves of a block that take the keys of the same rows in turn.
    fragments: Fragments of 16 keys that a wave takes at a time.
    """

    parts: int = 1
    row_waves: int = 1
    key_waves: int = 4
    fragments: int = 2

    def __post_init__(self) -> None:
        check(self.parts in (1, 2), f"a wave has 1 or 2 fragments of rows, got {self.parts}")
        check(
            self.fragments in (1, 2, 4), f"a wave takes 1, 2 or 4 fragments at a time, got {self.fragments}"
        )
        check(min(self.row_waves, self.key_waves) >= 1, f"a block has waves, got {self.waves}")

    @property
    def waves(self) -> int:
        """Waves of a block."""
        return self.row_waves * self.key_waves

    @property
    def wave_rows(self) -> int:
        """Rows of q of a wave."""
        return SIDE * self.parts

    @property
    def rows(self) -> int:
        """Rows of q of a block."""
        return self.row_waves * self.wave_rows

    @property
    def span(self) -> int:
        """Keys of a wave's turn."""
        return SIDE * self.fragments


SMALLEST = WaveAttentionSchedule(1, 1, 1, 1)
"""What takes the fewest registers and no LDS."""


def shared_words(form: Attention, plan: WaveAttentionSchedule) -> int:
    """Return the words of LDS in which waves leave their sums for each other."""
    return plan.key_waves * plan.rows * (form.width + PAD + STATE) if plan.key_waves > 1 else 0


def check_legal(form: Attention, device: TileDevice, plan: WaveAttentionSchedule) -> None:
    """Check that a kernel can be emitted.

    Raises ScheduleError if the device has no matrix cores, heads do not divide into fragments, or sums do not
        fit LDS.
    """
    fragment = fragment_of(device)
    waves = MOST_THREADS // device.warp
    check(plan.waves <= waves, f"a block of {device.name} has 1 to {waves} waves, got {plan.waves}")
    check(not head_problem(form), head_problem(form))
    check(form.heads % form.kv_heads == 0, "heads of q must divide into groups")
    held = registers(form, device, plan)
    check(
        held <= fragment.registers,
        f"heads of {form.size} elements take {held} registers of {fragment.registers}: {device.name} spills",
    )
    most, found = device.shared_per_block, 4 * shared_words(form, plan)
    check(
        found <= most, f"sums of {plan.key_waves} waves take {found} bytes of LDS; {device.name} has {most}"
    )


def is_legal(form: Attention, device: TileDevice, plan: WaveAttentionSchedule) -> bool:
    """Whether `check_legal` accepts the schedule."""
    return passes(check_legal, form, device, plan)


LAUNCH, BLOCK = 2.0e-6, 1.0e-6
"""Seconds of a launch, and of a block beside its turns: assumed, no such kernel has run on hardware."""

EXPECTED = 1.25
"""How much longer kernels that no hardware has run are taken to last than what is counted."""

PER_EXCHANGE = 3
"""Vector instructions by which halves of a wave exchange a register."""

PER_SCORE, PER_LOAD, PER_TURN = 16, 10, 60
"""Vector instructions of a lane's score, of a load with its address, and of a turn (machine code's)."""

L2_SHARE = 2.0
"""Bandwidth of L2 over that of DRAM: blocks of other rows of q read the same keys again."""


def schedules(form: Attention, device: TileDevice, tokens: int) -> list[WaveAttentionSchedule]:
    """Return the schedules that are considered.

    Raises ScheduleError if none is legal, as `check_legal`.
    """
    few = tokens * form.group <= SIDE
    ways = ((1, 1, keys) for keys in (8, 4, 2, 1)) if few else ((2, 4, 1), (1, 4, 1), (1, 1, 4), (1, 2, 2))
    found = [WaveAttentionSchedule(*way, fragments) for way in ways for fragments in (1, 2, 4)]
    legal = [plan for plan in found if is_legal(form, device, plan)]
    if not legal:
        check_legal(form, device, SMALLEST)
    return [plan for plan in legal if registers(form, device, plan) <= MOST_REGISTERS] or legal[-1:]


def registers(form: Attention, device: TileDevice, plan: WaveAttentionSchedule) -> int:
    """Return about how many registers a lane has: sums and q, keys and values in flight and as operands."""
    fragment, size = fragment_of(device), form.width
    kernel, keys, scores = fragment.spare
    own = plan.parts * (size // fragment.groups + size * fragment.operands // (2 * fragment.groups))
    moved = _words(form, fragment.groups) + fragment.run * _words(form, SIDE)
    if form.stored in CODES:
        kernel, keys = kernel + fragment.codes[0], keys + fragment.codes[1]
    return own + kernel + plan.fragments * (moved + keys + scores * plan.parts)


def _words(form: Attention, lanes: int) -> int:
    """Return the registers of a lane's part of a key or a value, of which `lanes` share one.

    Counted as if every load were as narrow as the narrowest: as operands they take as many.
    """
    return sum(piece.words(form.stored_bytes) for piece in pieces(form, lanes, narrow=True))


def predict(form: Attention, device: TileDevice, plan: WaveAttentionSchedule, case: Case) -> float:
    """Return the seconds that a schedule is predicted to take."""
    batch, tokens, keys = case
    dram, size = device.layers[0], form.size
    tiles = ceil(tokens * form.group / plan.rows)
    blocks = batch * form.kv_heads * tiles
    seen = keys / 2 if form.causal and tokens > plan.rows else keys
    turns = ceil(seen / (plan.span * plan.key_waves))
    threads = plan.waves * device.warp
    fitting = device.registers_per_unit // (registers(form, device, plan) * threads)
    at_once = max(1, min(fitting, 32 // plan.waves))
    rounds = ceil(blocks / (device.units * at_once))
    held = min(at_once, ceil(blocks / device.units)) * plan.waves / device.schedulers
    core = device.core_for(form.ttype)
    products = 4 * SIDE * SIDE * form.width * plan.fragments * plan.parts
    cycles = products * device.schedulers / (core.ops_per_cycle * core.sustained)
    cycles += _vector_instructions(form, device, plan) * fragment_of(device).cycles
    turn = max(dram.latency, cycles / device.clock * max(1.0, held))
    moved = blocks * turns * plan.key_waves * plan.span * 2 * size * form.stored_bytes
    streamed = max(moved / tiles, moved / L2_SHARE) / dram.sustained_bandwidth
    return LAUNCH + EXPECTED * max(rounds * (BLOCK + turns * turn), BLOCK + streamed)


def _vector_instructions(form: Attention, device: TileDevice, plan: WaveAttentionSchedule) -> int:
    """Return a wave's vector instructions of a turn."""
    fragment, size = fragment_of(device), form.width
    loads = 2 * plan.fragments * size * form.stored_bytes // fragment.lanes
    scores = fragment.run * plan.fragments * plan.parts
    moved = (plan.parts + plan.fragments) * size // (2 * fragment.groups)
    exchanged = plan.fragments * size // fragment.groups if fragment.operands > 1 else 0
    return PER_TURN + PER_SCORE * scores + PER_LOAD * loads + moved + PER_EXCHANGE * exchanged
