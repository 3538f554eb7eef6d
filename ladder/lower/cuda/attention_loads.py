"""Loads of attention: the limits of rows, q, and the keys, values and masks of an iteration, in registers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from tvm.script import tirx as T

from ladder.ir.attention import CODES, STEP_ELEMENTS, Attention, head_problem
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.functions import pack
from ladder.lower.gpu.attention import HeadPlace, Inputs, Limits, WordOperands, first_of_head, lane_decoders
from ladder.lower.gpu.emission import TirMachine, helper
from ladder.lower.gpu.instructions import MatrixStep, select_step
from ladder.lower.gpu.recipes import Conversion
from schedules.attention import STEP_KEYS, STEP_ROWS, WARP, AttentionSchedule
from schedules.attention_rows import Piece, divide
from schedules.layouts import Field
from schedules.schedule import check
from targets import TileDevice
from tile_types import get_type

LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632
"""Selectors of ``prmt``: the low halves of two words side by side, the high ones."""

LOADS = {16: "ld.global.L1::no_allocate.v4.u32", 8: "ld.global.L1::no_allocate.v2.u32",
         4: "ld.global.L1::no_allocate.u32"}  # fmt: skip
"""Bytes -> load of what is read once, the widest first."""

SHARED_LOADS = {16: "ld.shared.v4.u32", 8: "ld.shared.v2.u32", 4: "ld.shared.u32"}
"""Bytes -> load from shared memory."""

LANES_OF_KEY, LANES_OF_VALUE = 4, 8
"""Lanes that share a row of K, and of V."""

TRANSPOSE = "movmatrix.sync.aligned.m8n8.trans.b16"


@lru_cache(maxsize=64)
def lane_recipe(stored: str, operand: str) -> tuple[Any, float]:
    """Return the cheapest proven decoder of two codes in 16-bit lanes, and the factor of its results.

    Raises ScheduleError if the type has none.
    """
    every = lane_decoders(Conversion(get_type(stored), operand, raw=True))
    found = [(inner, gain) for proven, inner, gain in every if proven.in_range]
    check(bool(found), f"{stored} has no decoder to {operand} in lanes")
    return found[0]


class Operands(WordOperands):
    """How the lanes of a warp divide K, V and q."""

    def __init__(self, form: Attention) -> None:
        self.form, self.scaled = form, form.stored in CODES
        self.key_pieces = divide(form.width, LANES_OF_KEY, form.stored_bytes)
        self.value_pieces = divide(form.width, LANES_OF_VALUE, form.stored_bytes)
        self.key_words = form.width * form.stored_bytes // LANES_OF_KEY // 4
        self.value_words = form.width * form.stored_bytes // LANES_OF_VALUE // 4
        self.recipe: Any
        self.recipe, gain = lane_recipe(form.stored, form.ttype) if self.scaled else (None, 1.0)
        self.key_gain = self.value_gain = gain

    def row_bytes(self, tensor: str) -> int:
        """Return the bytes of a head's row of q, k or v."""
        return self.form.size * (2 if tensor == "q" else self.form.stored_bytes)

    def keys(self, words: Any, fragment: int) -> list[list[Expr]]:
        """Return the A operands of a fragment of keys, per step of 16 elements."""
        rows = []
        for half in range(2):
            first = (fragment * 2 + half) * self.key_words
            loaded = [words[first + i] for i in range(self.key_words)]
            rows.append([pair for word in loaded for pair in self.pairs(word)])
        return [
            [rows[0][at], rows[1][at], rows[0][at + 1], rows[1][at + 1]] for at in range(0, len(rows[0]), 2)
        ]

    def values(self, words: Any, fragment: int) -> Iterator[list[Expr]]:
        """Yield the A operands of transposed values, per tile of 16 elements of a head."""
        count = self.value_words
        rows = [[words[(fragment * 4 + key) * count + i] for i in range(count)] for key in range(4)]
        for at in range(count):
            low, high = (self.side_by_side(rows[i][at], rows[i + 1][at]) for i in (0, 2))
            for pair in range(0, len(low), 2):
                yield [low[pair], low[pair + 1], high[pair], high[pair + 1]]

    def place(self, element: int, g: Expr) -> Expr:
        """Return where in the head an element of lane group ``g`` lies."""
        piece = next(piece for piece in reversed(self.value_pieces) if piece.before <= element)
        return piece.column(g) + element - piece.before

    def transposed(self, low: Expr, high: Expr) -> Expr:
        """Return a register of the B operand from two weights of neighbouring rows."""
        out = b.local(1, "uint32")
        b.ptx(TRANSPOSE, out[0], pack(low, high, self.form.ttype))
        return out[0]

    def halves(self, low: Expr, high: Expr) -> Iterator[Expr]:
        source = helper("ladder_prmt", "prmt.b32 %0, %1, %2, %3;", 3)
        for selector in (LOW_HALVES, HIGH_HALVES):
            yield b.bind(b.call_inline("ladder_prmt", source, "uint32", low, high, T.uint32(selector)))

    def decoded(self, word: Expr, position: int) -> Expr:
        m = TirMachine()
        return self.recipe.convert(m, [m.input(word)], [Field(0, position, 8, 0)], None).content


@dataclass(frozen=True)
class Spec:
    """Decisions about a kernel before it is emitted."""

    form: Attention
    schedule: AttentionSchedule
    step: MatrixStep
    operands: Operands

    @property
    def parts(self) -> int:
        """Fragments of rows of q."""
        return self.schedule.rows // STEP_ROWS

    @property
    def tiles(self) -> int:
        """Fragments of a head's elements."""
        return self.form.width // STEP_ELEMENTS

    @property
    def span(self) -> int:
        """Keys of a warp's iteration."""
        return STEP_KEYS * self.schedule.fragments

    @property
    def scores(self) -> list[tuple[int, int, int]]:
        """(fragment, part, element) of a lane's scores of an iteration."""
        fragments = range(self.schedule.fragments)
        return [(f, p, e) for f in fragments for p in range(self.parts) for e in range(4)]


def choose_spec(form: Attention, device: TileDevice, schedule: AttentionSchedule) -> Spec:
    """Return the operands of a kernel.

    Raises ScheduleError if the head does not divide into fragments.
    """
    check(not head_problem(form), head_problem(form))
    check(form.heads % form.kv_heads == 0, "heads of q must divide into groups")
    return Spec(form, schedule, select_step(device, form.ttype), Operands(form))


@dataclass(frozen=True)
class Place(HeadPlace):
    """Where a thread works.

    rank: The block's place in its cluster.
    warp: The thread's warp.
    worker, workers: The warp among those that share the keys of a head, and how many those are.
    begins: First element of the head of ``"k"`` and ``"v"``.
    """

    rank: Expr
    warp: Expr
    worker: Expr
    workers: int
    begins: Mapping[str, Expr]


def find_place(spec: Spec, inputs: Inputs) -> Place:
    """Emit which rows of q and which keys this thread works on."""
    schedule, form, n = spec.schedule, spec.form, inputs.numbers
    total = b.bind(n["tokens"] * form.group)
    tiles = (total + schedule.rows - 1) // schedule.rows
    b.device(min_blocks=1)
    x, head, batch = b.block_index([schedule.cluster * tiles, form.kv_heads, n["batch"]])
    rank: Expr = b.keep(b.cluster_rank([schedule.cluster])[0]) if schedule.cluster > 1 else 0
    head, batch = b.keep(head), b.keep(batch)
    first_row = b.keep(x // schedule.cluster * schedule.rows)
    row_count = b.keep(T.min(total - first_row, schedule.rows))
    thread = b.thread_index(schedule.threads)
    lane = b.bind(thread % WARP)
    warp, g, c = b.keep(thread // WARP), b.keep(lane // 4), b.keep(lane % 4)
    worker = b.keep(warp * schedule.cluster + rank)  # the last keys are shared by all blocks
    begins = {name: b.keep(first_of_head(inputs, batch, head, name)) for name in ("k", "v")}
    return Place(
        inputs, form.group, head, batch, first_row, row_count, thread, lane, g, c, rank, warp, worker,
        schedule.warps * schedule.cluster, begins,
    )  # fmt: skip


class MadeRows(Protocol):
    """Rows that a kernel of attention makes itself: q, and keys and values that go into their caches.

    Its arguments are declared before those of attention.
    """

    rows: Any
    """q in shared memory: ``[heads of the group, elements of a head]``."""

    def allocate(self, pool: Any) -> None:
        """Take shared memory for q."""

    def prefetch(self, place: Place) -> None:
        """Bring small inputs into L2 while the kernel before may still run."""

    def emit(self, place: Place, span: int) -> None:
        """Make all rows of the block's head; the block may read them afterwards.

        span: Keys of a warp's iteration: the block whose warp reads a new key stores it.
        """


PREFETCH = "prefetch.global.L2"


def prefetch(spec: Spec, place: Place, iteration: Expr, needed: Expr) -> None:
    """Bring the keys and values of an iteration into L2, of ``needed`` keys."""
    form, n = spec.form, place.inputs.numbers
    lines = -(-form.size * form.stored_bytes // 128)
    for part in range(-(-spec.span * lines // WARP)):
        piece = b.bind(place.lane + part * WARP)
        key = b.bind(iteration * spec.span + piece // lines)
        with b.when(T.And(piece < spec.span * lines, key < needed)):
            for name in ("k", "v"):
                at = place.begins[name] + key * n[f"{name}_s"]
                at = at + piece % lines * (128 // form.stored_bytes)
                b.ptx(PREFETCH, place.inputs.tensors[name].ptr_to([at]))


def load_positions(spec: Spec, place: Place) -> list[list[Expr]]:
    """Emit the loads of the positions of the lane's rows of q, by part; they are not waited for."""
    parts = range(spec.parts if spec.form.position else 0)
    return [[place.position(part * STEP_ROWS + 2 * place.c + row) for row in range(2)] for part in parts]


def find_limits(spec: Spec, place: Place, positions: list[list[Expr]]) -> Limits:
    """Emit how many keys each of the lane's rows sees, and the block needs.

    positions: As of `load_positions`.
    """
    form, keys = spec.form, place.inputs.numbers["keys"]
    if not (form.causal or form.position):
        return Limits([[keys, keys] for _ in range(spec.parts)], keys)
    rows: list[list[Expr]] = []
    most: Expr = 0
    for part in range(spec.parts):
        rows.append([])
        for row in range(2):
            known = positions[part][row] if positions else None
            rows[part].append(place.seen_keys(form, part * STEP_ROWS + 2 * place.c + row, known))
            most = T.max(most, rows[part][row])
    for distance in (1, 2):
        most = b.bind(most)
        most = T.max(most, b.shuffle_xor(most, distance))
    return Limits(rows, b.keep(most))


def load(
    spec: Spec,
    place: Place,
    tensor: str,
    row: tuple[Expr, Expr],
    piece: Piece,
    to: tuple[Any, int],
    made: MadeRows | None = None,
) -> None:
    """Load a lane's piece of a head's row into words, and leave them if it lies beyond the head.

    row: Where the row begins, and which of the lanes that share it this one is.
    to: Words, and the first of the row's.
    made: Where the row lies in shared memory: there ``row`` begins with its number.
    """
    (at, lane), (words, first), size = row, to, spec.form.size
    each = spec.operands.row_bytes(tensor) // size
    column, first = piece.column(lane), first + piece.before * each // 4
    step = min(piece.elements * each, 16)
    beyond = piece.end(LANES_OF_VALUE if tensor == "v" else LANES_OF_KEY) > size
    with b.when(column < size) if beyond else nullcontext():
        for part in range(piece.elements * each // step):
            targets = (words[first + (part * step) // 4 + i] for i in range(step // 4))
            start = column + part * step // each
            if made is not None:
                b.ptx(SHARED_LOADS[step], *targets, made.rows.ptr_to([at, start]))
                continue
            b.ptx(LOADS[step], *targets, place.inputs.tensors[tensor].ptr_to([at + start]))


def zeros(spec: Spec, count: int) -> Any:
    """Return so many words for pieces of heads: 0, where some lie beyond the head."""
    words = b.local(count, "uint32")
    for index in range(count if spec.form.width > spec.form.size else 0):
        b.store(words, T.uint32(0), index)
    return words


def load_queries(spec: Spec, place: Place, made: MadeRows | None) -> list[list[Expr]]:
    """Load q as the B operand of scores: rows ``g`` of each part.

    made: Where the kernel has made them.
    """
    n, operands = place.inputs.numbers, spec.operands
    queries: list[list[Expr]] = []
    for part in range(spec.parts):
        row = part * STEP_ROWS + place.g
        if made is None:
            token, head = place.query(row)
            at = b.bind(place.batch * n["q_b"] + head * n["q_h"] + token * n["q_s"])
        else:
            at = b.bind(T.min(row, place.row_count - 1))
        words = zeros(spec, spec.form.width // 8)
        for piece in operands.key_pieces:
            load(spec, place, "q", (at, place.c), piece, (words, 0), made)
        queries.append(operands.in_order([words[i] for i in range(spec.form.width // 8)]))
    return queries


class Keys:
    """Registers of the keys, values, scales and masks of an iteration, and their loads.

    needed: How many keys the block needs.
    """

    def __init__(self, spec: Spec, place: Place, needed: Expr) -> None:
        self.spec, self.place, self.needed = spec, place, needed
        form, operands, fragments = spec.form, spec.operands, spec.schedule.fragments
        self.keys = zeros(spec, fragments * 2 * operands.key_words)
        self.values = zeros(spec, fragments * 4 * operands.value_words)
        scaled = operands.scaled
        self.key_scales: Any = b.local(fragments * 2, "float32") if scaled else None
        self.value_scales: Any = b.local(fragments * 2, "float32") if scaled else None
        dtype = "uint32" if form.mask == "bool" else "float32"
        self.masks: Any = b.local(len(spec.scores), dtype) if form.mask else None

    def load_keys(self, iteration: Expr) -> None:
        """Load the keys of an iteration: rows ``g`` and ``g + 8`` of each fragment."""
        spec, place, operands = self.spec, self.place, self.spec.operands
        for fragment in range(spec.schedule.fragments):
            for half in range(2):
                key = self._key(iteration, fragment, place.g + 8 * half)
                at = b.bind(place.begins["k"] + key * place.inputs.numbers["k_s"])
                words = self.keys, (fragment * 2 + half) * operands.key_words
                for piece in operands.key_pieces:
                    load(spec, place, "k", (at, place.c), piece, words)
                if operands.scaled:
                    self._load_scale("k_scale", key, self.key_scales, fragment * 2 + half)

    def load_values(self, iteration: Expr) -> None:
        """Load an iteration's values: of keys ``2 c, 2 c + 1, 2 c + 8, 2 c + 9`` of each fragment."""
        spec, place, operands = self.spec, self.place, self.spec.operands
        for fragment in range(spec.schedule.fragments):
            for index in range(4):
                key = self._key(iteration, fragment, 2 * place.c + index % 2 + 8 * (index // 2))
                at = b.bind(place.begins["v"] + key * place.inputs.numbers["v_s"])
                words = self.values, (fragment * 4 + index) * operands.value_words
                for piece in operands.value_pieces:
                    load(spec, place, "v", (at, place.g), piece, words)
            if operands.scaled:
                for half in range(2):
                    key = self._key(iteration, fragment, place.g + 8 * half)
                    self._load_scale("v_scale", key, self.value_scales, fragment * 2 + half)

    def load_mask(self, iteration: Expr) -> None:
        """Load what the mask says of the lane's scores."""
        place, n = self.place, self.place.inputs.numbers
        for index, (fragment, part, element) in enumerate(self.spec.scores):
            token, head = place.query(part * STEP_ROWS + 2 * place.c + element % 2)
            key = self._key(iteration, fragment, place.g + 8 * (element // 2))
            at = place.batch * n["mask_b"] + head * n["mask_h"] + token * n["mask_s"] + key
            mask = place.inputs.tensors["mask"][at]
            b.store(self.masks, T.Cast(str(self.masks.dtype), mask), index)

    def _key(self, iteration: Expr, fragment: int, within: Expr) -> Expr:
        """Return a key of an iteration; those beyond the last are the last: their weight is 0."""
        return b.bind(T.min(iteration * self.spec.span + fragment * STEP_KEYS + within, self.needed - 1))

    def _load_scale(self, name: str, key: Expr, scales: Any, index: int) -> None:
        at = self.place.begin(name) + key * self.place.inputs.numbers[f"{name}_s"]
        b.store(scales, self.place.inputs.tensors[name][at], index)
