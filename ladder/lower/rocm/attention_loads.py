"""Loads of attention on AMD GPUs: limits of rows, q, and the keys, values and masks of an iteration.

Pieces of keys, values and queries as lanes load them, and the operands that they become.

Sixteen lanes are the rows of an operand, groups of sixteen its columns: four of a wave of CDNA, two of RDNA
(`ladder.lower.rocm.steps`). Of a key, each group takes its part of the head, in pieces of up to 16 bytes, and
q comes in the same order. Of a value, each of the sixteen lanes takes a piece, and groups take a run of
neighbouring keys each. RDNA3's instructions read all columns from both groups, which exchange theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tvm.script import tirx as T

from ladder.ir.attention import CODES, Attention
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.attention import HeadPlace, Inputs, Limits, WordOperands, lane_decoders
from ladder.lower.gpu.recipes import Conversion
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.decode import Exact, proven_here, vector_instructions
from ladder.lower.rocm.gemm_place import WaveLanes, together
from ladder.lower.rocm.machine import RocmMachine, join_bfloat
from ladder.lower.rocm.steps import WaveStep, matrix_steps
from schedules.layouts import Field
from schedules.schedule import check
from schedules.wave_attention import (
    SIDE,
    WaveAttentionSchedule,
    check_legal,
    fragment_of,
    loads_narrowly,
    pieces,
)
from targets import TileDevice
from tile_types import get_type

LOW_HALVES, HIGH_HALVES = 0x05040100, 0x07060302
"""V_PERM's selectors of the low halves of two words side by side, and of the high ones."""


@lru_cache(maxsize=64)
def lane_recipe(stored: str, operand: str) -> tuple[Any, bool]:
    """Return the decoder of two codes in 16-bit lanes that takes the fewest instructions.

    Second comes whether its float32 results need no rounding. It leaves no factor: values that CDNA2 takes
    for 0 would be the smallest codes.

    Raises ScheduleError if the type has none.
    """
    conversion = Conversion(get_type(stored), operand, raw=True)
    found = [
        (here.recipe, inner)
        for proven, inner, gain in lane_decoders(conversion)
        if gain == 1.0
        for here in proven_here(proven, conversion)
    ]
    check(bool(found), f"{stored} has no decoder to {operand} in lanes")
    best, inner = min(found, key=lambda pair: vector_instructions(pair[0], conversion))
    return inner, isinstance(best, Exact)


class Operands(WordOperands):
    """How the lanes of a wave divide K, V and q."""

    def __init__(self, form: Attention, device: TileDevice, narrow: bool = False) -> None:
        self.form, self.scaled, width = form, form.stored in CODES, form.stored_bytes
        self.width = width
        self.fragment = fragment_of(device)
        self.groups = self.fragment.groups
        self.key_pieces, self.value_pieces = (pieces(form, lanes, narrow) for lanes in (self.groups, SIDE))
        self.key_widths = [piece.words(width) for piece in self.key_pieces]
        self.value_widths = [piece.words(width) for piece in self.value_pieces]
        self.recipe = lane_recipe(form.stored, form.ttype) if self.scaled else None
        self.steps = matrix_steps(device, form.ttype)

    @property
    def tiles(self) -> int:
        """Fragments of a head's elements."""
        return self.form.width // SIDE

    def step(self, count: int) -> WaveStep:
        """Return the widest instruction for operands of so many registers of a lane's own."""
        return next(step for step in self.steps if count % self.own_words(step) == 0)

    def own_words(self, step: WaveStep) -> int:
        """Return the registers of an operand that a lane has before halves of a wave exchange theirs."""
        return step.words // self.fragment.operands

    def whole(self, words: Sequence[Expr], group: Expr) -> list[Expr]:
        """Return operands, each with those of the other half of the wave where instructions take both.

        Those of the first half come first.
        """
        if self.fragment.operands == 1:
            return list(words)
        found: list[Expr] = []
        run = self.own_words(self.steps[0])
        for at in range(0, len(words), run):
            own = [b.bind(word) for word in words[at : at + run]]
            found += d.with_other_half(own, group == 0)
        return found

    def key_words(self, words: Sequence[Expr]) -> list[Expr]:
        """Return the operand registers of a lane's part of a key."""
        return [pair for word in words for pair in self.pairs(word)]

    def value_words(self, keys: Sequence[Sequence[Expr]]) -> Iterator[list[Expr]]:
        """Yield the operand registers of each tile of a head, from the words of a lane's run of values."""
        real = [min(4 // self.width, piece.elements) for piece in self.value_pieces]
        held = [count for count, words in zip(real, self.value_widths, strict=True) for _ in range(words)]
        for count, words in zip(held, zip(*keys, strict=True), strict=True):
            pairs = [self.side_by_side(*words[i : i + 2]) for i in range(0, len(words), 2)]
            yield from [list(registers) for registers in zip(*pairs, strict=True)][:count]

    def weights(self, values: Sequence[Expr]) -> list[Expr]:
        """Return weights of neighbouring keys as operand registers."""
        return [pack(values[i], values[i + 1], self.form.ttype) for i in range(0, len(values), 2)]

    def halves(self, low: Expr, high: Expr) -> Iterator[Expr]:
        for selector in (LOW_HALVES, HIGH_HALVES):
            yield b.bind(d.intrinsic("uint32", "llvm.amdgcn.perm", high, low, T.uint32(selector)))

    def decoded(self, word: Expr, position: int) -> Expr:
        assert self.recipe is not None
        m = RocmMachine()
        recipe, m.exact = self.recipe
        return recipe.convert(m, [m.input(word)], [Field(0, position, 8, 0)], None).content


def pack(low: Expr, high: Expr, dtype: str) -> Expr:
    """Round two float32 values to 16 bits, in one word."""
    if dtype == "bfloat16":
        return join_bfloat(low, high)
    return d.as_type(d.vector([T.Cast("float16", low), T.Cast("float16", high)]), "uint32")


ALIGNED = 16
"""Bytes that all rows of q, k, v and the result begin at multiples of."""


@dataclass(frozen=True)
class Spec:
    """Decisions about a kernel before it is emitted."""

    form: Attention
    device: TileDevice
    schedule: WaveAttentionSchedule
    operands: Operands

    @property
    def run(self) -> int:
        """Neighbouring keys of a score's column that a lane holds, and rows of a column of sums."""
        return self.operands.fragment.run

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.schedule.waves * self.device.warp

    @property
    def scores(self) -> list[tuple[int, int, int]]:
        """(fragment, part, element) of a lane's scores of an iteration."""
        plan = self.schedule
        return [(f, p, e) for f in range(plan.fragments) for p in range(plan.parts) for e in range(self.run)]


def choose_spec(form: Attention, device: TileDevice, schedule: WaveAttentionSchedule) -> Spec:
    """Return the operands of a kernel.

    Raises ScheduleError as `schedules.wave_attention.check_legal`.
    """
    check_legal(form, device, schedule)
    operands = Operands(form, device, loads_narrowly(form, device, schedule))
    return Spec(form, device, schedule, operands)


@dataclass(frozen=True)
class Place(HeadPlace):
    """Where a lane works.

    row_wave, key_wave: The wave among those that have other rows, and other keys.
    left: The row of a left operand (a key, or elements of a head) that the lane holds.
    """

    row_wave: Expr
    key_wave: Expr
    left: Expr


def aligned(at: Expr, width: int) -> Expr:
    """Return an offset that is a multiple of `ALIGNED` bytes such that LLVM knows it."""
    unit = ALIGNED // width
    return b.keep(T.truncdiv(at, unit)) * unit


def find_place(spec: Spec, inputs: Inputs) -> Place:
    """Emit which rows of q and which keys this lane works on."""
    plan, form, n = spec.schedule, spec.form, inputs.numbers
    total = b.bind(n["tokens"] * form.group)
    tiles = b.bind((total + plan.rows - 1) // plan.rows)
    blocks = tiles * form.kv_heads * n["batch"]
    dealt, thread = d.launch(blocks, spec.threads)
    dies = spec.device.dies
    block = b.keep(together(dealt, blocks, dies)) if dies > 1 else dealt
    tile, rest = b.keep(T.truncmod(block, tiles)), b.bind(T.truncdiv(block, tiles))
    head, batch = b.keep(T.truncmod(rest, form.kv_heads)), b.keep(T.truncdiv(rest, form.kv_heads))
    first_row = b.keep(tile * plan.rows)
    row_count = b.keep(T.min(total - first_row, plan.rows))
    lanes = spec.device.warp
    lane = b.bind(thread % lanes)
    wave = WaveLanes(lane, lanes).uniform(thread // lanes) if plan.waves > 1 else 0
    key_wave, row_wave = (wave % plan.key_waves, wave // plan.key_waves) if plan.waves > 1 else (0, 0)
    g, c = b.keep(lane // SIDE), b.keep(lane % SIDE)
    fragment = spec.operands.fragment
    left = b.keep(d.left_row(c, fragment.operands, fragment.run))
    return Place(
        inputs, form.group, head, batch, first_row, row_count, thread, lane, g, c, row_wave, key_wave, left
    )  # fmt: skip


def find_limits(spec: Spec, place: Place) -> Limits:
    """Emit how many keys the lane's rows see, and its wave needs."""
    form, keys = spec.form, place.inputs.numbers["keys"]
    parts = range(spec.schedule.parts)
    if not (form.causal or form.position):
        return Limits([keys for _ in parts], keys)
    rows = [place.seen_keys(form, row_of(spec, place, part)) for part in parts]
    most = rows[0] if len(rows) == 1 else b.keep(T.max(*rows))
    lanes = WaveLanes(place.lane, spec.device.warp)
    for distance in (1, 2, 4, 8):
        most = b.keep(T.max(most, lanes.shuffle_xor(most, distance)))
    return Limits(rows, lanes.uniform(most))


def row_of(spec: Spec, place: Place, part: int) -> Expr:
    """Return the row of the block that a lane has in a part of its scores."""
    return place.row_wave * spec.schedule.wave_rows + part * SIDE + place.c


def load(tensor: Any, at: Expr, elements: int, width: int) -> tuple[Expr, int]:
    """Return neighbouring elements of a tensor as words (less than one is its low bits), and how many."""
    nbytes = elements * width
    loaded = tensor[d.lanes(at, elements)]
    if nbytes < 4:
        return T.Cast("uint32", d.as_type(loaded, f"uint{8 * nbytes}")), 1
    words = nbytes // 4
    return d.as_type(loaded, "uint32" if words == 1 else f"uint32x{words}"), words


def load_within(
    spec: Spec, tensor: Any, row: Expr, column: Expr, end: int, piece: tuple[int, int]
) -> tuple[Expr, int]:
    """Return a piece of a head's row as `load` does; zeros if it lies beyond the head.

    row, column: Where the row begins, and the piece in it.
    end: Where the piece of the last lane ends.
    piece: Elements, and bytes of each.
    """
    size, (elements, width) = spec.form.size, piece
    if end <= size:
        return load(tensor, row + column, elements, width)
    found, words = load(tensor, row + T.min(column, size - elements), elements, width)
    kept = T.Select(column < size, T.uint32(0xFFFFFFFF), T.uint32(0))
    return found & (kept if words == 1 else T.Broadcast(kept, words)), words


WIDEST_OF_Q = 8
"""Elements of q that a lane loads at once: 16 bytes."""


def load_queries(spec: Spec, place: Place) -> list[list[Expr]]:
    """Load q as operands of scores, by part."""
    n, operands = place.inputs.numbers, spec.operands
    queries: list[list[Expr]] = []
    loads = [
        (piece, first, min(piece.elements, WIDEST_OF_Q))
        for piece in operands.key_pieces
        for first in range(0, piece.elements, WIDEST_OF_Q)
    ]
    for part in range(spec.schedule.parts):
        token, head = place.query(row_of(spec, place, part))
        at = aligned(place.batch * n["q_b"] + head * n["q_h"] + token * n["q_s"], 2)
        words = d.Pieces([step // 2 for _, _, step in loads])
        for index, (piece, first, step) in enumerate(loads):
            column, end = piece.column(place.g) + first, piece.end(operands.groups)
            words.store(index, *load_within(spec, place.inputs.tensors["q"], at, column, end, (step, 2)))
        own = operands.in_order([words[i] for i in range(len(words.places))])
        queries.append(operands.whole(own, place.g))
    return queries


class Keys:
    """Registers of the keys, values, scales and masks of an iteration, and their loads.

    needed: How many keys the wave needs.
    """

    def __init__(self, spec: Spec, place: Place, needed: Expr) -> None:
        self.spec, self.place, self.needed = spec, place, needed
        form, operands, fragments = spec.form, spec.operands, spec.schedule.fragments
        self.keys = d.Pieces(operands.key_widths * fragments)
        self.values = d.Pieces(operands.value_widths * (fragments * spec.run))
        scales = [1] * (fragments * spec.run) if operands.scaled else []
        self.key_scales, self.value_scales = d.Pieces(scales), d.Pieces(scales)
        self.masks = d.Pieces([1] * len(spec.scores) if form.mask else [])
        self.begins = {name: aligned(place.begin(name), operands.width) for name in "kv"}
        n = place.inputs.numbers
        self.steps = {name: aligned(n[f"{name}_s"], operands.width) for name in "kv"}

    def load_keys(self, iteration: Expr) -> None:
        """Load the lane's part of a key of each of an iteration's fragments, and the scales of its scores."""
        operands, place = self.spec.operands, self.place
        for fragment in range(self.spec.schedule.fragments):
            at = self._row("k", self._key(iteration, fragment, place.left))
            first = fragment * len(operands.key_pieces)
            for index, found in enumerate(self._row_pieces("k", at)):
                self.keys.store(first + index, *found)
        if operands.scaled:
            self._load_scales("k_scale", iteration, self.key_scales)

    def load_values(self, iteration: Expr) -> None:
        """Load an iteration's values: pieces of those of its run of keys of each fragment."""
        operands, place = self.spec.operands, self.place
        for fragment in range(self.spec.schedule.fragments):
            for key in range(self.spec.run):
                at = self._row("v", self._key(iteration, fragment, place.g * self.spec.run + key))
                first = (fragment * self.spec.run + key) * len(operands.value_pieces)
                for index, found in enumerate(self._row_pieces("v", at)):
                    self.values.store(first + index, *found)
        if operands.scaled:
            self._load_scales("v_scale", iteration, self.value_scales)

    def load_mask(self, iteration: Expr) -> None:
        """Load what the mask says of the lane's scores."""
        place, n, mask = self.place, self.place.inputs.numbers, self.place.inputs.tensors["mask"]
        rows = []
        for part in range(self.spec.schedule.parts):
            token, head = place.query(row_of(self.spec, place, part))
            rows.append(b.bind(place.batch * n["mask_b"] + head * n["mask_h"] + token * n["mask_s"]))
        for index, (fragment, part, element) in enumerate(self.spec.scores):
            key = self._key(iteration, fragment, place.g * self.spec.run + element)
            self.masks.store(index, _mask_word(mask[rows[part] + key]), 1)

    def mask(self, index: int) -> Expr:
        """Return what the mask says of a score: a truth value, or what is added."""
        kind, word = self.spec.form.mask, self.masks[index]
        return word != T.uint32(0) if kind == "bool" else d.as_type(word, "float32")

    def key(self, fragment: int) -> list[Expr]:
        """Return the words of the lane's part of a key."""
        count = sum(self.spec.operands.key_widths)
        return [self.keys[fragment * count + i] for i in range(count)]

    def value(self, fragment: int) -> list[list[Expr]]:
        """Return the words of the lane's pieces of a run of values."""
        count = sum(self.spec.operands.value_widths)
        first, run = fragment * self.spec.run, range(self.spec.run)
        return [[self.values[(first + key) * count + i] for i in range(count)] for key in run]

    def _row_pieces(self, name: str, at: Expr) -> Iterator[tuple[Expr, int]]:
        """Yield the lane's pieces of a key or a value that begins at an element, as `load` does."""
        operands, tensor = self.spec.operands, self.place.inputs.tensors[name]
        keys = name == "k"
        lanes, lane = (operands.groups, self.place.g) if keys else (SIDE, self.place.left)
        for piece in operands.key_pieces if keys else operands.value_pieces:
            size = piece.elements, operands.width
            yield load_within(self.spec, tensor, at, piece.column(lane), piece.end(lanes), size)

    def _row(self, name: str, key: Expr) -> Expr:
        return self.begins[name] + key * self.steps[name]

    def _key(self, iteration: Expr, fragment: int, within: Expr) -> Expr:
        """Return a key of an iteration; those beyond the last are the last: their weight is 0."""
        return b.bind(
            T.min(iteration * self.spec.schedule.span + (fragment * SIDE + within), self.needed - 1)
        )

    def _load_scales(self, name: str, iteration: Expr, scales: d.Pieces) -> None:
        place, tensor = self.place, self.place.inputs.tensors[name]
        for fragment in range(self.spec.schedule.fragments):
            for element in range(self.spec.run):
                key = self._key(iteration, fragment, place.g * self.spec.run + element)
                at = place.begin(name) + key * place.inputs.numbers[f"{name}_s"]
                scales.store(fragment * self.spec.run + element, d.as_type(tensor[at], "uint32"), 1)


def _mask_word(value: Expr) -> Expr:
    """Return an element of a mask as a word: a truth value, or the bits of a float32."""
    dtype = str(value.ty.dtype)
    if dtype == "uint8":
        return T.Cast("uint32", value)
    if dtype == "bfloat16":
        return T.Cast("uint32", d.as_type(value, "uint16")) << T.uint32(16)
    return d.as_type(T.Cast("float32", value), "uint32")
