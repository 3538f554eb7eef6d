"""Attention for few query tokens: keys and values stream from memory straight into matrix operands.

A block has up to 16 rows of q: tokens times the heads that share keys. Its warps, and those of the other
blocks of its cluster, take fragments of 16 keys in turn. A lane loads K and V in pieces of up to 16 bytes, in
that order of elements in which the pieces *are* operands: ``sᵀ = K qᵀ`` takes rows of K as they lie (q is
loaded in the same order), ``oᵀ = Vᵀ pᵀ`` takes pairs of neighbouring keys, which one byte permutation per
register makes. Nothing passes through shared memory but the sums of the warps at the end (`Join`).
Scores stay in float32; sums are rescaled when a larger score comes (online softmax).

Lane ``4 g + c`` has keys ``g`` and ``g + 8`` of a fragment and rows ``2 c`` and ``2 c + 1`` of q, as in the
accumulators of ``mma.m16n8k16``; ``movmatrix`` iterations weights into the B operand of the second product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

from ladder.ir.attention import LOG2_E, Attention
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.attention_loads import (
    Keys,
    MadeRows,
    Place,
    Spec,
    choose_spec,
    find_limits,
    find_place,
    load_positions,
    load_queries,
    prefetch,
)
from ladder.lower.cuda.functions import pack
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.attention import LOWEST, VECTOR, Limits, declare_inputs, joined, unseen_rows, weigh
from schedules.attention import STEP_KEYS, STEP_ROWS, AttentionSchedule
from schedules.schedule import check
from targets import TileDevice


def over_keys(value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Return the combination over the lanes that hold other keys of the same rows."""
    for distance in (4, 8, 16):
        value = b.bind(combine(value, b.shuffle_xor(value, distance)))
    return value


def _held(value: Expr) -> Expr:
    return b.Variable("float32", value).value


def multiply(spec: Spec, sums: Any, at: int, a: Sequence[Expr], x: Sequence[Expr], *, fresh: bool) -> None:
    """Emit ``sums += a · x``, or, if ``fresh``, ``sums = a · x``."""
    registers = [sums[at + i] for i in range(4)]
    start = [T.float32(0)] * 4 if fresh else registers
    b.ptx(spec.step.spelling, *registers, *a, *x, *start)


def raw_scores(spec: Spec, queries: list[list[Expr]], keys: Any) -> Any:
    """Return the products of q and the keys of an iteration in registers, in the order of `Spec.scores`."""
    scores = b.local(len(spec.scores), "float32")
    other = b.local(4, "float32")
    for fragment in range(spec.schedule.fragments):
        registers = spec.operands.keys(keys, fragment)
        for part in range(spec.parts):
            first = (fragment * spec.parts + part) * 4
            chains = [(scores, first), (other, 0)]
            for step, a in enumerate(registers):
                sums, at = chains[step % 2]
                multiply(spec, sums, at, a, queries[part][2 * step : 2 * step + 2], fresh=step < 2)
            for i in range(4 if len(registers) > 1 else 0):
                b.store(scores, scores[first + i] + other[i], first + i)
    return scores


class Sums:
    """Sums of a lane."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        count, parts = spec.parts * spec.tiles * 4, range(spec.parts)
        self.values = b.local(count, "float32")
        for index in range(count):
            b.store(self.values, T.float32(0), index)
        self.maxima = [[b.Variable("float32", T.float32(LOWEST)) for _ in range(2)] for _ in parts]
        self.totals = [[b.Variable("float32", T.float32(0)) for _ in range(2)] for _ in parts]

    def weigh(self, scores: list[Expr]) -> None:
        """Rescale the sums so far to the largest scores; scores become weights."""
        for part in range(self.spec.parts):
            for row in range(2):
                self._rescale(scores, part, row)

    def _rescale(self, scores: list[Expr], part: int, row: int) -> None:
        """Find the largest score of a row, and scale what was summed to it; scores become weights."""
        places = enumerate(self.spec.scores)
        mine = [at for at, (_, p, element) in places if p == part and element % 2 == row]
        held = self.maxima[part][row], self.totals[part][row]
        shrink = weigh(scores, mine, held, lambda x: _held(over_keys(b.bind(x), T.max)), T.exp2)
        for tile in range(self.spec.tiles):
            for half in range(2):
                at = (part * self.spec.tiles + tile) * 4 + 2 * half + row
                b.store(self.values, self.values[at] * shrink, at)

    def add(self, weights: list[list[list[Expr]]], values: Any) -> None:
        """Add the values of an iteration times their weights, operands by fragment and part."""
        spec = self.spec
        for fragment in range(spec.schedule.fragments):
            for tile, a in enumerate(spec.operands.values(values, fragment)):
                for part in range(spec.parts):
                    at = (part * spec.tiles + tile) * 4
                    multiply(spec, self.values, at, a, weights[fragment][part], fresh=False)


def seen_scores(
    spec: Spec, keys: Keys, limits: list[list[Expr]], g: Expr, iteration: Expr, scores: Any
) -> list[Expr]:
    """Return the scaled scores of an iteration, in powers of two; minus infinity for keys that are masked."""
    form, factor = spec.form, spec.form.scale * LOG2_E * spec.operands.key_gain
    found = []
    for index, (fragment, part, element) in enumerate(spec.scores):
        key = iteration * spec.span + (fragment * STEP_KEYS + 8 * (element // 2)) + g
        value = scores[index] * T.float32(factor)
        if keys.key_scales is not None:
            value = value * keys.key_scales[fragment * 2 + element // 2]
        seen = key < limits[part][element % 2]
        if form.mask == "bool":
            seen = T.And(seen, keys.masks[index] != T.uint32(0))
        elif form.mask:
            value = value + keys.masks[index] * T.float32(LOG2_E)
        minus = T.reinterpret("float32", T.uint32(0xFF800000))
        found.append(_held(T.Select(seen, value, minus)))
    return found


def weight_operands(spec: Spec, keys: Keys, weights: list[Expr], fragment: int, part: int) -> list[Expr]:
    """Return the B operand that weights are, scaled as the values are."""
    first = (fragment * spec.parts + part) * 4
    words = []
    for half in range(2):
        pair = weights[first + 2 * half : first + 2 * half + 2]
        if keys.value_scales is not None:
            scale = keys.value_scales[fragment * 2 + half]
            pair = [weight * scale for weight in pair]
        words.append(spec.operands.transposed(*pair))
    return words


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

    def __init__(self, spec: Spec, place: Place, made: MadeRows | None) -> None:
        self.spec, self.place, self.schedule = spec, place, spec.schedule
        size, schedule = spec.form.size, spec.schedule
        pool = b.SharedPool()
        if made is not None:
            made.allocate(pool)
        self.sums = pool.alloc((schedule.warps, schedule.rows, spec.form.width + PAD), "float32", align=16)
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
        for part in range(self.spec.parts):
            for row in range(2):
                at = part * STEP_ROWS + 2 * place.c + row
                total = over_keys(sums.totals[part][row].value, lambda x, y: x + y)
                with b.when(place.g == 0):
                    b.store(self.states, sums.maxima[part][row].value, place.warp, at, 0)
                    b.store(self.states, total, place.warp, at, 1)
                for piece in operands.value_pieces:
                    width = min(piece.elements, 4)
                    for first in range(piece.before, piece.before + piece.elements, width):
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
    """Return what `joined` does, in registers."""
    sums, largest, total = joined(states, parts, T.exp2)
    return [_held(value) for value in sums], largest, _held(total)


def _vector(buffer: Any, *place: Expr) -> list[Expr]:
    words = b.local(VECTOR, "float32")
    b.ptx("ld.shared.v4.f32", *(words[i] for i in range(VECTOR)), buffer.ptr_to(list(place)))
    return [words[i] for i in range(VECTOR)]


def _write_peer(place: Expr, rank: Expr, values: list[Expr]) -> None:
    b.emit(b.call_inline("ladder_write_peer", WRITE_PEER, "void", place, rank, *values))


def emit(form: Attention, device: TileDevice, schedule: AttentionSchedule, name: str) -> Any:
    """Emit one kernel: ``(numbers..., tensors...)`` as the form names them; tensors have one axis.

    Raises ScheduleError if the head does not divide into fragments.
    """
    with b.function(name, noalias=False) as result:  # nothing may be read before `Overlap.wait`
        emit_body(form, device, schedule)
    return result.func


def emit_body(
    form: Attention, device: TileDevice, schedule: AttentionSchedule, made: MadeRows | None = None
) -> None:
    """Emit arguments and code of a kernel as `emit`; it takes no q where that is ``made``."""
    spec, overlap = choose_spec(form, device, schedule), Overlap(device)
    inputs = declare_inputs(form, "" if made is None else "q")
    overlap.declare(axes=3, cluster=schedule.cluster)
    place = find_place(spec, inputs)
    join = Join(spec, place, made)
    overlap.release()
    if overlap.possible:  # while the kernel before still runs
        prefetch(spec, place, place.worker, inputs.numbers["keys"])
        if made is not None:
            made.prefetch(place)
    overlap.wait()
    positions = load_positions(spec, place)
    if made is not None:
        made.emit(place, spec.span)
    limits, queries = find_limits(spec, place, positions), load_queries(spec, place, made)
    sums = Sums(spec)
    walk(spec, place, limits, queries, sums, Keys(spec, place, limits.needed))
    join.finish(sums)


def walk(spec: Spec, place: Place, limits: Limits, queries: list[list[Expr]], sums: Sums, keys: Keys) -> None:
    """Emit the loop over a warp's keys: loads of the next iteration are in flight while one is computed."""
    worker, workers, span = place.worker, place.workers, spec.span
    iterations = b.keep((limits.needed + span - 1) // span)
    early: list[Callable[[Expr], None]] = [keys.load_keys]  # as soon as the last ones are multiplied
    late: list[Callable[[Expr], None]] = []
    if spec.operands.scaled:  # scales come with keys, and are needed longer
        early, late = late, early
    if spec.form.mask:
        late.append(keys.load_mask)

    def fetch(loads: Sequence[Callable[[Expr], None]], iteration: Expr) -> None:
        if loads:
            with b.when(iteration < iterations):
                for load in loads:
                    load(iteration)

    fetch([*late, *early, keys.load_values], worker)
    prefetch(spec, place, worker + workers, limits.needed)
    count = b.keep(T.max((iterations - worker + workers - 1) // workers, 0))
    with b.loop(count, rolled=True) as index:
        iteration = b.keep(worker + index * workers)
        following = b.keep(iteration + workers)
        raw = raw_scores(spec, queries, keys.keys)
        fetch(early, following)
        weights = seen_scores(spec, keys, limits.rows, place.g, iteration, raw)
        sums.weigh(weights)
        operands = [
            [weight_operands(spec, keys, weights, fragment, part) for part in range(spec.parts)]
            for fragment in range(spec.schedule.fragments)
        ]
        fetch(late, following)
        sums.add(operands, keys.values)
        fetch([keys.load_values], following)
