"""Attention for few query tokens: keys and values stream from memory straight into matrix operands.

A block has up to 16 rows of q: tokens times the heads that share keys. Its warps, and those of the other
blocks of its cluster, take fragments of 16 keys in turn. A lane loads K and V in pieces of up to 16 bytes, in
that order of elements in which the pieces *are* operands: ``sᵀ = K qᵀ`` takes rows of K as they lie (q is
loaded in the same order), ``oᵀ = Vᵀ pᵀ`` takes pairs of neighbouring keys, which one byte permutation per
register makes. Nothing passes through shared memory but the sums of the warps at the end (`attention_join`).
Scores stay in float32; sums are rescaled when a larger score comes (online softmax).

Lane ``4 g + c`` has keys ``g`` and ``g + 8`` of a fragment and rows ``2 c`` and ``2 c + 1`` of q, as in the
accumulators of ``mma.m16n8k16``; ``movmatrix`` turns weights into the B operand of the second product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.ir.attention import LOG2_E, Attention
from ladder.lower import builder as b
from ladder.lower.cuda.attention_join import Joiner, over_keys
from ladder.lower.cuda.attention_operands import Operands
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.arguments import tir_name
from ladder.lower.gpu.instructions import select_step
from schedules.attention import FRAGMENT, STEP_ROWS, WARP, AttentionSchedule
from schedules.schedule import check
from targets import TileDevice

Expr = Any

LOWEST = -1e30
"""Where maxima begin: below every score that counts, and finite, so that differences are numbers."""

LOADS = {4: "ld.global.L1::no_allocate.u32", 8: "ld.global.L1::no_allocate.v2.u32",
         16: "ld.global.L1::no_allocate.v4.u32"}  # fmt: skip
"""Bytes -> load of what is read once."""

ALIGNMENT = {"q": 16, "k": 16, "v": 16, "out": 16}
"""Bytes at which tensors begin that are accessed in wide pieces."""

PREFETCH = "prefetch.global.L2"


def _tir(ttype: str) -> str:
    """Return the TIR type of a tensor; truth values are bytes."""
    return "uint8" if ttype == "bool" else tir_name(ttype)


def emit(form: Attention, device: TileDevice, schedule: AttentionSchedule, name: str) -> Any:
    """Emit one kernel: ``(numbers..., tensors...)`` as the form names them; tensors have one axis.

    Raises
    ------
    ScheduleError
        If the head does not divide into fragments.
    """
    with b.function(name, noalias=False) as result:  # nothing may be read before `Overlap.wait`
        AttentionKernel(form, device, schedule).emit()
    return result.func


class AttentionKernel:
    """One kernel being emitted."""

    def __init__(self, form: Attention, device: TileDevice, schedule: AttentionSchedule) -> None:
        check(form.size % 16 == 0 and 16 <= form.size <= 256, f"heads of {form.size} elements have no kernel")
        check(form.heads % form.kv_heads == 0, "heads of q must divide into groups")
        self.form, self.plan = form, schedule
        self.overlap = Overlap(device)
        self.step = select_step(device, form.ttype)
        self.operands = Operands(form, device)
        self.parts = schedule.rows // STEP_ROWS
        self.tiles = form.size // FRAGMENT

    # ---- frame -----------------------------------------------------------------------------------------
    def emit(self) -> None:
        """Emit the whole body."""
        self.numbers = {name: I.arg(name, I.int32()) for name in self.form.numbers()}
        self.tensors = {
            name: b.tensor(name, (b.symbol(f"{name}_length"),), _tir(ttype), align=ALIGNMENT.get(name, 1))
            for name, ttype in self.form.tensors().items()
        }
        cluster = ["clusterCtaIdx.x"] * (self.plan.cluster > 1)
        self.overlap.declare("blockIdx.x", "blockIdx.y", "blockIdx.z", *cluster, "threadIdx.x")
        self._locate()
        self.joiner = Joiner(self)
        self.overlap.release()
        self._prefetch()
        self.overlap.wait()
        self._find_limits()
        self._load_queries()
        self._begin_sums()
        self._walk()
        self.joiner.finish()

    def _locate(self) -> None:
        plan, form, n = self.plan, self.form, self.numbers
        total = b.bind(n["tokens"] * form.group)
        tiles = (total + plan.rows - 1) // plan.rows
        b.device(plan.resident)
        x, head, batch = b.block_index([plan.cluster * tiles, form.kv_heads, n["batch"]])
        self.rank: Expr = b.keep(b.cluster_rank([plan.cluster])[0]) if plan.cluster > 1 else 0
        self.head, self.batch = b.keep(head), b.keep(batch)
        self.first_row = b.keep(x // plan.cluster * plan.rows)
        self.row_count = b.keep(T.min(total - self.first_row, plan.rows))
        self.thread = b.thread_index(plan.threads)
        lane = b.bind(self.thread % WARP)
        self.warp, self.g, self.c = b.keep(self.thread // WARP), b.keep(lane // 4), b.keep(lane % 4)
        self.worker, self.workers = b.keep(self.rank * plan.warps + self.warp), plan.warps * plan.cluster
        self.lane = lane
        self.span = FRAGMENT * plan.fragments
        self.begins = {name: b.keep(self._begin(name)) for name in ("k", "v")}

    def _begin(self, name: str) -> Expr:
        """Return the first element of this block's head of keys or what belongs to them."""
        n = self.numbers
        return self.batch * n[f"{name}_b"] + self.head * n[f"{name}_h"]

    def query(self, row: Expr) -> tuple[Expr, Expr]:
        """Return token and head of q of a row of the block; rows beyond the last are the last."""
        row = b.bind(T.min(row, self.row_count - 1) + self.first_row)
        group = self.form.group
        return b.bind(row // group), b.bind(self.head * group + row % group)

    def _prefetch(self) -> None:
        """Bring the first keys and values into L2 while the kernel before still runs."""
        if not self.overlap.possible:
            return
        row_bytes = self.form.size * self.form.stored_bytes
        lines = -(-row_bytes // 128)
        for part in range(-(-self.span * lines // WARP)):
            piece = b.bind(self.lane + part * WARP)
            key = b.bind(self.worker * self.span + piece // lines)
            with b.when(T.And(piece < self.span * lines, key < self.numbers["keys"])):
                for name in ("k", "v"):
                    at = self.begins[name] + key * self.numbers[f"{name}_s"]
                    at = at + piece % lines * (128 // self.form.stored_bytes)
                    b.ptx(PREFETCH, self.tensors[name].ptr_to([at]))

    def _find_limits(self) -> None:
        """Find how many keys each of the lane's rows sees, and the block needs."""
        form, n, keys = self.form, self.numbers, self.numbers["keys"]
        self.limits: list[list[Expr]] = [[keys, keys] for _ in range(self.parts)]
        self.needed: Expr = keys
        if not (form.causal or form.position):
            return
        most: Expr = 0
        for part, row in ((part, row) for part in range(self.parts) for row in range(2)):
            token, _ = self.query(part * STEP_ROWS + 2 * self.c + row)
            limit = keys
            if form.causal:
                limit = T.min(limit, token + 1)
            if form.position:
                at = self.batch * n["position_b"] + token * n["position_s"]
                seen = T.Cast("int32", self.tensors["position"][at]) + form.reach
                limit = T.max(T.min(limit, seen), 0)
            self.limits[part][row] = b.keep(limit)
            most = T.max(most, self.limits[part][row])
        for distance in (1, 2):
            most = b.bind(most)
            other = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), most, distance, WARP, WARP)
            most = T.max(most, other)
        self.needed = b.keep(most)

    # ---- loads -----------------------------------------------------------------------------------------
    def load(self, tensor: str, at: Expr, words: Any, first: int, nbytes: int) -> None:
        """Load neighbouring bytes into words."""
        step = min(nbytes, 16)
        per_step = step // 4
        for part in range(nbytes // step):
            targets = (words[first + part * per_step + i] for i in range(per_step))
            elements = part * step * self.form.size // self.operands.row_bytes(tensor)
            b.ptx(LOADS[step], *targets, self.tensors[tensor].ptr_to([at + elements]))

    def _load_queries(self) -> None:
        """Load q as the B operand of scores: rows ``g`` of each part."""
        n, operands = self.numbers, self.operands
        self.queries: list[list[Expr]] = []
        for part in range(self.parts):
            token, head = self.query(part * STEP_ROWS + self.g)
            at = b.bind(self.batch * n["q_b"] + head * n["q_h"] + token * n["q_s"])
            words = b.local(self.form.size // 8, "uint32")
            piece = operands.key_elements
            for index in range(operands.key_pieces):
                place = at + (index * 4 + self.c) * piece
                self.load("q", place, words, index * piece // 2, 2 * piece)
            self.queries.append(operands.query_words(words))

    def _load_keys(self, turn: Expr) -> None:
        """Load the keys of a turn: rows ``g`` and ``g + 8`` of each fragment."""
        operands = self.operands
        for fragment in range(self.plan.fragments):
            for half in range(2):
                key = self._key(turn, fragment, self.g + 8 * half)
                at = b.bind(self.begins["k"] + key * self.numbers["k_s"])
                for index in range(operands.key_pieces):
                    place = at + (index * 4 + self.c) * operands.key_elements
                    first = ((fragment * 2 + half) * operands.key_pieces + index) * operands.key_words
                    self.load("k", place, self.key_words, first, 4 * operands.key_words)
                if operands.scaled:
                    self._load_scale("k_scale", key, self.key_scales, fragment * 2 + half)

    def _load_values(self, turn: Expr) -> None:
        """Load the values of a turn: those of keys ``2 c, 2 c + 1, 2 c + 8, 2 c + 9`` of each fragment."""
        operands = self.operands
        for fragment in range(self.plan.fragments):
            for index in range(4):
                key = self._key(turn, fragment, 2 * self.c + index % 2 + 8 * (index // 2))
                at = b.bind(self.begins["v"] + key * self.numbers["v_s"])
                for piece in range(operands.value_pieces):
                    place = at + (piece * 8 + self.g) * operands.value_elements
                    first = ((fragment * 4 + index) * operands.value_pieces + piece) * operands.value_words
                    self.load("v", place, self.value_words, first, 4 * operands.value_words)
            if operands.scaled:
                for half in range(2):
                    key = self._key(turn, fragment, self.g + 8 * half)
                    self._load_scale("v_scale", key, self.value_scales, fragment * 2 + half)

    def _key(self, turn: Expr, fragment: int, within: Expr) -> Expr:
        """Return a key of a turn; those beyond the last are the last: their weight is 0."""
        return b.bind(T.min(turn * self.span + fragment * FRAGMENT + within, self.needed - 1))

    def _load_scale(self, name: str, key: Expr, scales: Any, index: int) -> None:
        at = self._begin(name) + key * self.numbers[f"{name}_s"]
        b.store(scales, self.tensors[name][at], index)

    def _load_mask(self, turn: Expr) -> None:
        """Load what the mask says of the lane's scores."""
        n = self.numbers
        for index, (fragment, part, element) in enumerate(self._scores()):
            token, head = self.query(part * STEP_ROWS + 2 * self.c + element % 2)
            key = self._key(turn, fragment, self.g + 8 * (element // 2))
            at = self.batch * n["mask_b"] + head * n["mask_h"] + token * n["mask_s"] + key
            b.store(self.masks, T.Cast(str(self.masks.dtype), self.tensors["mask"][at]), index)

    def _scores(self) -> list[tuple[int, int, int]]:
        """Return (fragment, part, element) of the lane's scores of a turn."""
        plan = self.plan
        return [(f, p, e) for f in range(plan.fragments) for p in range(self.parts) for e in range(4)]

    # ---- the loop over keys ------------------------------------------------------------------------------
    def _begin_sums(self) -> None:
        plan, operands = self.plan, self.operands
        self.sums = b.local(self.parts * self.tiles * 4, "float32")
        for index in range(self.parts * self.tiles * 4):
            b.store(self.sums, T.float32(0), index)
        self.maxima = [
            [b.Variable("float32", T.float32(LOWEST)) for _ in range(2)] for _ in range(self.parts)
        ]
        self.totals = [[b.Variable("float32", T.float32(0)) for _ in range(2)] for _ in range(self.parts)]
        self.key_words = b.local(plan.fragments * 2 * operands.key_pieces * operands.key_words, "uint32")
        count = plan.fragments * 4 * operands.value_pieces * operands.value_words
        self.value_words = b.local(count, "uint32")
        if operands.scaled:
            self.key_scales = b.local(plan.fragments * 2, "float32")
            self.value_scales = b.local(plan.fragments * 2, "float32")
        if self.form.mask:
            dtype = "uint32" if self.form.mask == "bool" else "float32"
            self.masks = b.local(len(self._scores()), dtype)

    def _walk(self) -> None:
        """Emit the loop: the loads of the next turn are in flight while this one is computed."""
        workers = self.workers
        turns = b.keep((self.needed + self.span - 1) // self.span)
        loads: list[Callable[[Expr], None]] = [self._load_keys, self._load_values]
        if self.form.mask:
            loads.insert(0, self._load_mask)
        with b.when(self.worker < turns):
            for load in loads:
                load(self.worker)
        count = b.keep(T.max((turns - self.worker + workers - 1) // workers, 0))
        with b.loop(count, rolled=True) as index:
            turn = b.keep(self.worker + index * workers)
            following = b.keep(turn + workers)
            scores = self._product()
            weights = self._weigh(scores, turn)
            with b.when(following < turns):
                for load in loads[:-1]:
                    load(following)
            self._accumulate(weights)
            with b.when(following < turns):
                self._load_values(following)

    def _product(self) -> Any:
        """Return the raw scores of a turn in registers, in the order of `_scores`."""
        scores = b.local(len(self._scores()), "float32")
        other = b.local(4, "float32")
        for fragment in range(self.plan.fragments):
            registers = self.operands.keys(self.key_words, fragment)
            for part in range(self.parts):
                first = (fragment * self.parts + part) * 4
                chains = [(scores, first), (other, 0)]
                for step, a in enumerate(registers):
                    sums, at = chains[step % 2]
                    query = self.queries[part][2 * step : 2 * step + 2]
                    self._multiply(sums, at, a, query, fresh=step < 2)
                for i in range(4 if len(registers) > 1 else 0):
                    b.store(scores, scores[first + i] + other[i], first + i)
        return scores

    def _multiply(
        self, sums: Any, at: int, a: Sequence[Expr], x: Sequence[Expr], fresh: bool = False
    ) -> None:
        """Emit ``sums += a · x``, or ``sums = a · x``."""
        registers = [sums[at + i] for i in range(4)]
        start = [T.float32(0)] * 4 if fresh else registers
        b.ptx(self.step.spelling, *registers, *a, *x, *start)

    def _weigh(self, scores: Any, turn: Expr) -> list[list[list[Expr]]]:
        """Turn scores into weights; rescale the sums so far. Returns operands per fragment and part."""
        form, factor = self.form, self.form.scale * LOG2_E * self.operands.key_gain
        found = []
        for index, (fragment, part, element) in enumerate(self._scores()):
            key = turn * self.span + (fragment * FRAGMENT + 8 * (element // 2)) + self.g
            value = scores[index] * T.float32(factor)
            if self.operands.scaled:
                value = value * self.key_scales[fragment * 2 + element // 2]
            seen = key < self.limits[part][element % 2]
            if form.mask == "bool":
                seen = T.And(seen, self.masks[index] != T.uint32(0))
            elif form.mask:
                value = value + self.masks[index] * T.float32(LOG2_E)
            minus = T.reinterpret("float32", T.uint32(0xFF800000))
            found.append(b.Variable("float32", T.Select(seen, value, minus)).value)
        for part in range(self.parts):
            for row in range(2):
                self._rescale(found, part, row)
        weights: list[list[list[Expr]]] = []
        for fragment in range(self.plan.fragments):
            weights.append([self._weights(found, fragment, part) for part in range(self.parts)])
        return weights

    def _rescale(self, scores: list[Expr], part: int, row: int) -> None:
        """Find the largest score of a row, and scale what was summed to it; scores become weights."""
        mine = [at for at, (_, p, element) in enumerate(self._scores()) if p == part and element % 2 == row]
        running, total = self.maxima[part][row], self.totals[part][row]
        largest: Expr = running.value
        for at in mine:
            largest = T.max(largest, scores[at])
        largest = b.Variable("float32", over_keys(b.bind(largest), T.max)).value
        shrink = b.Variable("float32", T.exp2(running.value - largest)).value
        running.set(largest)
        added: Expr = total.value * shrink
        for at in mine:
            scores[at] = b.Variable("float32", T.exp2(scores[at] - largest)).value
            added = added + scores[at]
        total.set(added)
        for tile in range(self.tiles):
            for half in range(2):
                at = (part * self.tiles + tile) * 4 + 2 * half + row
                b.store(self.sums, self.sums[at] * shrink, at)

    def _weights(self, weights: list[Expr], fragment: int, part: int) -> list[Expr]:
        """Return the B operand that weights are, scaled as the values are."""
        first = (fragment * self.parts + part) * 4
        words = []
        for half in range(2):
            pair = weights[first + 2 * half : first + 2 * half + 2]
            if self.operands.scaled:
                scale = self.value_scales[fragment * 2 + half]
                pair = [weight * scale for weight in pair]
            words.append(self.operands.transposed(*pair))
        return words

    def _accumulate(self, weights: list[list[list[Expr]]]) -> None:
        for fragment in range(self.plan.fragments):
            for tile, a in enumerate(self.operands.values(self.value_words, fragment)):
                for part in range(self.parts):
                    at = (part * self.tiles + tile) * 4
                    self._multiply(self.sums, at, a, weights[fragment][part])
