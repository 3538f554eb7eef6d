"""Stream-K: sums that blocks pass to each other through a workspace in global memory, and flags.

Which block waits for which is executed as it is. A flag hands on what the warp knew that raised it, by
the release and acquire in the helpers' text; sums that a block takes in must be among that (`Handed`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ladder.simulate.barriers import NamedWait
from ladder.simulate.cohort import Cohort, Wait
from ladder.simulate.memory import Pointer, Tensor
from ladder.simulate.program import Node, Plain, Sequence_, Waiting
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import LANES, NUMPY, Array, Value, spread

FLAG_BYTES, QUAD_BYTES = 8, 16


class Handed:
    """Which warp stored each quad of sums in the workspace, and which stores each raised flag orders.

    Vector clocks cover one cluster, so a flag is kept with the block and clock of the warp that raised it.

    size: Bytes of the workspace.
    """

    def __init__(self, size: int) -> None:
        self.warp = np.full(size // QUAD_BYTES, -1, np.int64)
        self.epoch = np.zeros(size // QUAD_BYTES, np.int64)
        self.flags: dict[int, tuple[int, Array]] = {}

    @staticmethod
    def of(c: Cohort, tensor: Tensor) -> Handed:
        found: Handed = c.machine.extras.setdefault("handed", Handed(tensor.size))
        return found

    def store(self, c: Cohort, place: Array) -> None:
        """Note the active threads' stores of a quad at bytes ``place[warps, 32]``."""
        quads, active = place[c.active] // QUAD_BYTES, c.active
        warps = np.broadcast_to(c.warps[:, None], active.shape)[active]
        self.warp[quads] = warps
        self.epoch[quads] = c.machine.memory.clocks.epoch(warps)

    def raised(self, c: Cohort, place: Array, chosen: Array) -> None:
        """Note which flags the chosen threads raise."""
        clocks = c.machine.memory.clocks
        rows, lanes = np.nonzero(chosen)
        for row, lane in zip(rows.tolist(), lanes.tolist(), strict=True):
            warp = int(c.warps[row])
            known = clocks.known[warp].copy()
            self.flags[int(place[row, lane]) // FLAG_BYTES] = warp // c.machine.block_warps, known
        clocks.advance(c.warps)

    def check(self, c: Cohort, flags: Array | None, place: Array, statement: int) -> None:
        """Report quads at ``place`` whose stores precede no flag that the reading warp has waited for."""
        nothing = -1, np.zeros(c.machine.memory.agents.count, np.int32)
        for row in range(c.count):
            quads = place[row] // QUAD_BYTES
            block, known = nothing
            if flags is not None:
                block, known = self.flags.get(int(flags[row]) // FLAG_BYTES, nothing)
            writer = self.warp[quads]
            late = self.epoch[quads] > known[c.machine.memory.clocks.own[np.maximum(writer, 0)]]
            if (late | (writer // c.machine.block_warps != block)).any():
                message = "takes in sums that the flag it waited for does not vouch for"
                c.machine.log.add("race", statement, message, "flag")


def allocate(t: Translator, call: CallView) -> int:
    """Return the address of the workspace: 0, in a tensor of its own with arbitrary contents."""
    size = t.number(call.operands[0])
    t.workspace = Tensor("workspace", np.full(size, 0xA7, np.uint8))
    t.workspace.track_stores()
    t.launch.together = True
    return 0


def _workspace(t: Translator) -> Tensor:
    found = t.workspace
    if not isinstance(found, Tensor):
        raise UnknownCallError("sums are handed over, but the kernel asked for no workspace")
    return found


def _quads(share: Value, thread: Value, count: int, threads: int, c: Cohort) -> Array:
    """Return the byte ``[warps, 32]`` at which a thread's first four sums of a share lie."""
    at = np.asarray(share, np.int64) * (count // 4 * threads) + np.asarray(thread, np.int64)
    return np.broadcast_to(at * QUAD_BYTES, (c.count, LANES))


def hand_over(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Node:
    """Store a thread's sums, then arrive where the flags are raised, and wait there if the text does."""
    count, threads = int(groups[0]), int(groups[1])
    base, _, share, thread = (t.read(operand) for operand in call.operands[:4])
    first, tensor = t.expression(call.operands[4]).target, _workspace(t)
    kind, statement = NUMPY["float32"], call.statement

    def action(c: Cohort) -> None:
        place = base(c) + _quads(share(c), thread(c), count, threads, c)
        for quad in range(count // 4):
            held = [spread(c.load(first + 4 * quad + i, statement, kind), c.count, kind) for i in range(4)]
            data = np.stack(held, axis=2).view(np.uint8)
            at = Pointer("global", tensor, place + quad * threads * QUAD_BYTES)
            c.machine.memory.store_global(c, at, data, statement)
            Handed.of(c, tensor).store(c, at.offset)
        if "bar.arrive" in source:
            number = _barrier(source, "bar.arrive")
            c.machine.named_barriers.arrive(c, number, threads + LANES, False, statement)

    return Sequence_(True, [Plain(action=action), _meeting(source, threads, statement)])


def announce(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Node:
    """Wait for all that hand over, then raise a flag for each of their warps."""
    threads, raised = int(groups[0]), _raised(source)
    flags, share, lane = (t.read(operand) for operand in call.operands)
    tensor, statement = _workspace(t), call.statement

    def action(c: Cohort) -> None:
        lanes = spread(lane(c), c.count, np.dtype(np.int64))
        at = flags(c) + (np.asarray(share(c), np.int64) * (threads // LANES) + lanes) * FLAG_BYTES
        chosen = c.narrowed(lanes < threads // LANES)
        _set_flags(tensor, at[chosen], raised)
        Handed.of(c, tensor).raised(c, at, chosen)

    return Sequence_(True, [_meeting(source, threads, statement), Plain(action=action)])


def _meeting(source: str, threads: int, statement: int) -> Node:
    """Return the wait, if a helper has one, in which those who hand over meet the warp that raises flags."""

    def make(c: Cohort) -> Wait | None:
        if "bar.sync" not in source:
            return None
        c.machine.named_barriers.arrive(c, _barrier(source, "bar.sync"), threads + LANES, True, statement)
        return NamedWait(c.machine.named_barriers, statement)

    return Waiting(True, make)


def _barrier(source: str, verb: str) -> int:
    """Return the named barrier at which those who hand over meet the warp that raises flags."""
    return int(source.partition(f"{verb} ")[2].partition(",")[0])


def _raised(source: str) -> int:
    """Return the value of a flag that is up, as the helper spells it."""
    return int(source[: source.index("ull")].rpartition("0x")[2], 16)


def _set_flags(tensor: Tensor, places: Array, value: int) -> None:
    view = tensor.bytes[: tensor.bytes.size // FLAG_BYTES * FLAG_BYTES].view(np.uint64)
    view[places // FLAG_BYTES] = np.uint64(value)


@dataclass
class FlagWait:
    """Wait until a warp's flag is up."""

    tensor: Tensor
    places: Callable[[Cohort], Array]
    raised: int
    statement: int

    def ready(self, c: Cohort) -> Array:
        view = self.tensor.bytes[: self.tensor.bytes.size // FLAG_BYTES * FLAG_BYTES].view(np.uint64)
        ready: Array = view[self.places(c) // FLAG_BYTES] == np.uint64(self.raised)
        return ready

    def complete(self, c: Cohort) -> None:
        """Learn nothing here: clocks end at the cluster, see `Handed`."""

    def describe(self, c: Cohort) -> str:
        return "a flag in the workspace that no block raises"


def take_over(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Node:
    """Wait for a warp's flag, take it down, and add another block's sums to one's own."""
    count, threads, waits = int(groups[0]), int(groups[1]), "while (found" in source
    raised = _raised(source) if waits else 0
    base, flags, share, thread = (t.read(operand) for operand in call.operands[:4])
    first, tensor = t.expression(call.operands[4]).target, _workspace(t)
    kind, statement = NUMPY["float32"], call.statement

    def places(c: Cohort) -> Array:
        index = (np.asarray(share(c), np.int64) * threads + np.asarray(thread(c), np.int64)) // LANES
        return np.broadcast_to(flags(c) + index * FLAG_BYTES, (c.count, LANES))[:, 0]

    def action(c: Cohort) -> None:
        _set_flags(tensor, places(c), 0)
        place = base(c) + _quads(share(c), thread(c), count, threads, c)
        for quad in range(count // 4):
            at = Pointer("global", tensor, place + quad * threads * QUAD_BYTES)
            Handed.of(c, tensor).check(c, places(c) if waits else None, at.offset, statement)
            part = c.machine.memory.load_global(c, at, 16, statement).view(kind)
            for i in range(4):
                slot = first + 4 * quad + i
                c.store(slot, c.load(slot, statement, kind) + part[:, :, i], statement, kind)

    wait = Waiting(True, lambda c: FlagWait(tensor, places, raised, statement) if waits else None)
    return Sequence_(True, [wait, Plain(action=action)])
