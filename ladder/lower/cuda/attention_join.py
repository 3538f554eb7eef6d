"""The end of attention: the sums of all warps, and of all blocks of a cluster, become one result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.blocks.fragments import pack
from schedules.attention import STEP_ROWS, WARP
from schedules.schedule import check

if TYPE_CHECKING:
    from ladder.lower.cuda.attention import AttentionKernel

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


def over_keys(value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Return the combination over the lanes that hold other keys of the same rows."""
    for distance in (4, 8, 16):
        other = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), value, distance, WARP, WARP)
        value = b.bind(combine(value, other))
    return value


class Joiner:
    """Shared memory of the end, and its steps.

    Each block of a cluster finishes a share of the pieces of rows: all send it theirs, so that one barrier is
    enough, and none has to stay until others have read its memory.
    """

    def __init__(self, kernel: AttentionKernel) -> None:
        self.kernel, plan, size = kernel, kernel.plan, kernel.form.size
        pool = b.shared_pool()
        self.sums = pool.alloc((plan.warps, plan.rows, size + PAD), "float32", align=16)
        self.states = pool.alloc((plan.warps, plan.rows, STATE), "float32", align=16)
        self.row_pieces = size // VECTOR
        self.pieces = plan.rows * self.row_pieces
        self.share = self.pieces // plan.cluster
        if plan.cluster > 1:
            check(self.pieces % plan.cluster == 0, f"{self.pieces} pieces of rows for {plan.cluster} blocks")
            self.inbox = pool.alloc((plan.cluster, self.share, VECTOR), "float32", align=16)
            self.peers = pool.alloc((plan.cluster, plan.rows, STATE), "float32", align=16)
        pool.commit()
        if plan.cluster > 1:  # nobody may be written to before it runs
            b.ptx("barrier.cluster.arrive.release")

    def finish(self) -> None:
        """Emit the end of the kernel."""
        self._publish()
        b.block_sync()
        if self.kernel.plan.cluster == 1:
            self._each(0, self.pieces, lambda piece, row, at: self._store(row, at, *self._block(row, at)))
            return
        b.ptx("barrier.cluster.wait.acquire")
        self._each(0, self.pieces, self._send)
        self._send_states()
        b.cluster_sync()
        first = self.kernel.rank * self.share
        self._each(
            first, self.share, lambda piece, row, at: self._store(row, at, *self._received(piece, row))
        )

    def _publish(self) -> None:
        """Write the warp's sums to shared memory."""
        kernel, operands = self.kernel, self.kernel.operands
        width = 4 if operands.value_elements >= 4 else 2
        for part in range(kernel.parts):
            for row in range(2):
                place = part * STEP_ROWS + 2 * kernel.c + row
                total = over_keys(kernel.totals[part][row].value, lambda x, y: x + y)
                with b.when(kernel.g == 0):
                    b.store(self.states, kernel.maxima[part][row].value, kernel.warp, place, 0)
                    b.store(self.states, total, kernel.warp, place, 1)
                for first in range(0, 2 * kernel.tiles, width):
                    found = [
                        kernel.sums[(part * kernel.tiles + e // 2) * 4 + 2 * (e % 2) + row]
                        for e in range(first, first + width)
                    ]
                    target = self.sums.ptr_to([kernel.warp, place, operands.place(first, kernel.g)])
                    b.ptx(f"st.shared.v{width}.f32", target, *found)

    def _each(self, first: Expr, count: int, body: Callable[[Expr, Expr, Expr], None]) -> None:
        """Emit ``body(piece, row, element)`` for pieces of the block's rows, shared among its threads."""
        kernel, threads = self.kernel, self.kernel.plan.threads
        for turn in range(-(-count // threads)):
            piece = b.bind(kernel.thread + turn * threads)
            row = b.bind((first + piece) // self.row_pieces)
            at = b.bind((first + piece) % self.row_pieces * VECTOR)
            with b.when(T.And(piece < count, row < kernel.row_count)):
                body(piece, row, at)

    def _block(self, row: Expr, at: Expr) -> tuple[list[Expr], Expr, Expr]:
        """Return sums of the warps, their largest score and the sum of their weights."""
        count = self.kernel.plan.warps
        parts = [_vector(self.sums, w, row, at) for w in range(count)]
        return _joined(self._warp_states(row), parts)

    def _warp_states(self, row: Expr) -> list[list[Expr]]:
        return [[self.states[w, row, i] for i in range(2)] for w in range(self.kernel.plan.warps)]

    def _send(self, piece: Expr, row: Expr, at: Expr) -> None:
        """Send a piece of this block's sums to the block that finishes it."""
        sums, _, _ = self._block(row, at)
        place = self.inbox.ptr_to([self.kernel.rank, piece % self.share, 0])
        _write_peer(place, piece // self.share, sums)

    def _send_states(self) -> None:
        """Send this block's largest scores and sums of weights to all."""
        kernel, plan = self.kernel, self.kernel.plan
        count = plan.rows * plan.cluster
        for turn in range(-(-count // plan.threads)):
            item = b.bind(kernel.thread + turn * plan.threads)
            row = b.bind(item // plan.cluster)
            with b.when(T.And(item < count, row < kernel.row_count)):
                _, largest, total = _joined(self._warp_states(row), [])
                place = self.peers.ptr_to([kernel.rank, row, 0])
                _write_peer(place, item % plan.cluster, [largest, total, total, total])

    def _received(self, piece: Expr, row: Expr) -> tuple[list[Expr], Expr, Expr]:
        """Return sums of the blocks of the cluster, as `_block`."""
        ranks = range(self.kernel.plan.cluster)
        states = [[self.peers[rank, row, i] for i in range(2)] for rank in ranks]
        return _joined(states, [_vector(self.inbox, rank, piece, 0) for rank in ranks])

    def _store(self, row: Expr, at: Expr, sums: list[Expr], largest: Expr, total: Expr) -> None:
        """Divide by the sum of weights and store; rows that see no key are 0."""
        kernel, n = self.kernel, self.kernel.numbers
        token, head = kernel.query(row)
        scale = T.float32(kernel.operands.value_gain) / total
        scale = b.Variable("float32", T.Select(total > T.float32(0), scale, T.float32(0))).value
        words = [pack(sums[i] * scale, sums[i + 1] * scale, kernel.form.ttype) for i in (0, 2)]
        place = kernel.batch * n["out_b"] + head * n["out_h"] + token * n["out_s"] + at
        b.ptx("st.global.v2.u32", kernel.tensors["out"].ptr_to([place]), *words)


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
