"""The end of attention: the sums of all warps, and of all blocks of a cluster, become one result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.attention_place import Place, Spec
from ladder.lower.cuda.attention_sums import Sums, over_keys
from ladder.lower.cuda.functions import pack
from ladder.lower.gpu.attention import unseen_rows
from schedules.attention import STEP_ROWS
from schedules.schedule import check

Expr = Any

VECTOR = 4
"""Elements of a head that a thread joins at a time."""

PAD = 4
"""float32 between rows of sums, so that lanes of different rows use different banks."""

STATE = 4
"""float32 per row: largest score, sum of weights, and room for 16 bytes."""

WRITE_PEER = """
static __device__ __forceinline__ void ladder_write_peer(
    void* place, int rank, float a, float b, float c, float d) {
  unsigned int at = (unsigned int)__cvta_generic_to_shared(place);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(at), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
               : : "r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
"""


class Join:
    """Shared memory of the end, and its steps.

    Each block of a cluster finishes a share of the pieces of rows: all send it theirs, so that one barrier is
    enough, and none has to stay until others have read its memory.
    """

    def __init__(self, spec: Spec, place: Place) -> None:
        self.spec, self.place, self.schedule = spec, place, spec.schedule
        size, schedule = spec.form.size, spec.schedule
        pool = b.shared_pool()
        self.sums = pool.alloc((schedule.warps, schedule.rows, size + PAD), "float32", align=16)
        self.states = pool.alloc((schedule.warps, schedule.rows, STATE), "float32", align=16)
        self.row_pieces = size // VECTOR
        self.pieces = schedule.rows * self.row_pieces
        self.share = self.pieces // schedule.cluster
        if schedule.cluster > 1:
            check(self.pieces % schedule.cluster == 0, f"{self.pieces} pieces for {schedule.cluster} blocks")
            self.inbox = pool.alloc((schedule.cluster, self.share, VECTOR), "float32", align=16)
            self.peers = pool.alloc((schedule.cluster, schedule.rows, STATE), "float32", align=16)
        pool.commit()
        if schedule.cluster > 1:  # nobody may be written to before it runs
            b.ptx("barrier.cluster.arrive.release")

    def finish(self, sums: Sums) -> None:
        """Emit the end of the kernel."""
        self._publish(sums)
        b.block_sync()
        if self.schedule.cluster == 1:
            self._each(0, self.pieces, lambda piece, row, at: self._store(row, at, *self._block(row, at)))
            return
        b.ptx("barrier.cluster.wait.acquire")
        self._each(0, self.pieces, self._send)
        self._send_states()
        b.cluster_sync()
        first = self.place.rank * self.share
        self._each(
            first, self.share, lambda piece, row, at: self._store(row, at, *self._received(piece, row))
        )

    def _publish(self, sums: Sums) -> None:
        """Write the warp's sums to shared memory."""
        place, operands, tiles = self.place, self.spec.operands, self.spec.tiles
        width = 4 if operands.value_elements >= 4 else 2
        for part in range(self.spec.parts):
            for row in range(2):
                at = part * STEP_ROWS + 2 * place.c + row
                total = over_keys(sums.totals[part][row].value, lambda x, y: x + y)
                with b.when(place.g == 0):
                    b.store(self.states, sums.maxima[part][row].value, place.warp, at, 0)
                    b.store(self.states, total, place.warp, at, 1)
                for first in range(0, 2 * tiles, width):
                    found = [
                        sums.values[(part * tiles + e // 2) * 4 + 2 * (e % 2) + row]
                        for e in range(first, first + width)
                    ]
                    target = self.sums.ptr_to([place.warp, at, operands.place(first, place.g)])
                    b.ptx(f"st.shared.v{width}.f32", target, *found)

    def _each(self, first: Expr, count: int, body: Callable[[Expr, Expr, Expr], None]) -> None:
        """Emit ``body(piece, row, element)`` for pieces of the block's rows, shared among its threads."""
        threads = self.schedule.threads
        for iteration in range(-(-count // threads)):
            piece = b.bind(self.place.thread + iteration * threads)
            row = b.bind((first + piece) // self.row_pieces)
            at = b.bind((first + piece) % self.row_pieces * VECTOR)
            with b.when(T.And(piece < count, row < self.place.row_count)):
                body(piece, row, at)

    def _block(self, row: Expr, at: Expr) -> tuple[list[Expr], Expr, Expr]:
        """Return sums of the warps, their largest score and the sum of their weights."""
        parts = [_vector(self.sums, w, row, at) for w in range(self.schedule.warps)]
        return _joined(self._warp_states(row), parts)

    def _warp_states(self, row: Expr) -> list[list[Expr]]:
        return [[self.states[w, row, i] for i in range(2)] for w in range(self.schedule.warps)]

    def _send(self, piece: Expr, row: Expr, at: Expr) -> None:
        """Send a piece of this block's sums to the block that finishes it."""
        sums, _, _ = self._block(row, at)
        place = self.inbox.ptr_to([self.place.rank, piece % self.share, 0])
        _write_peer(place, piece // self.share, sums)

    def _send_states(self) -> None:
        """Send this block's largest scores and sums of weights to all."""
        schedule = self.schedule
        count = schedule.rows * schedule.cluster
        for iteration in range(-(-count // schedule.threads)):
            item = b.bind(self.place.thread + iteration * schedule.threads)
            row = b.bind(item // schedule.cluster)
            with b.when(T.And(item < count, row < self.place.row_count)):
                _, largest, total = _joined(self._warp_states(row), [])
                place = self.peers.ptr_to([self.place.rank, row, 0])
                _write_peer(place, item % schedule.cluster, [largest, total, total, total])

    def _received(self, piece: Expr, row: Expr) -> tuple[list[Expr], Expr, Expr]:
        """Return sums of the blocks of the cluster, as `_block`."""
        ranks = range(self.schedule.cluster)
        states = [[self.peers[rank, row, i] for i in range(2)] for rank in ranks]
        return _joined(states, [_vector(self.inbox, rank, piece, 0) for rank in ranks])

    def _store(self, row: Expr, at: Expr, sums: list[Expr], largest: Expr, total: Expr) -> None:
        """Divide by the sum of weights and store."""
        place, n = self.place, self.place.inputs.numbers
        token, head = place.query(row)
        scale = T.float32(self.spec.operands.value_gain) / total
        unseen = unseen_rows(self.spec.form, n["keys"])
        scale = b.Variable("float32", T.Select(total > T.float32(0), scale, unseen)).value
        words = [pack(sums[i] * scale, sums[i + 1] * scale, self.spec.form.ttype) for i in (0, 2)]
        to = place.batch * n["out_b"] + head * n["out_h"] + token * n["out_s"] + at
        b.ptx("st.global.v2.u32", place.inputs.tensors["out"].ptr_to([to]), *words)


def _joined(states: list[list[Expr]], parts: list[list[Expr]]) -> tuple[list[Expr], Expr, Expr]:
    """Return sums that were scaled to different largest scores as one; no parts: only their states."""
    largest = states[0][0]
    for state in states[1:]:
        largest = T.max(largest, state[0])
    largest = b.Variable("float32", largest).value
    factors = [b.Variable("float32", T.exp2(state[0] - largest)).value for state in states]
    total: Expr = T.float32(0)
    for factor, state in zip(factors, states, strict=True):
        total = total + factor * state[1]
    sums: list[Expr] = [T.float32(0)] * VECTOR
    for factor, part in zip(factors, parts, strict=False):
        sums = [found + factor * value for found, value in zip(sums, part, strict=True)]
    held = [b.Variable("float32", value).value for value in sums]
    return held, largest, b.Variable("float32", total).value


def _vector(buffer: Any, *place: Expr) -> list[Expr]:
    words = b.local(VECTOR, "float32")
    b.ptx("ld.shared.v4.f32", *(words[i] for i in range(VECTOR)), buffer.ptr_to(list(place)))
    return [words[i] for i in range(VECTOR)]


def _write_peer(place: Expr, rank: Expr, values: list[Expr]) -> None:
    b.emit(b.call_inline("ladder_write_peer", WRITE_PEER, "void", place, rank, *values))
