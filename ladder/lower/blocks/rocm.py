"""Block graphs on AMD GPUs: MFMA and WMMA 16x16, LDS by vectors, exchanges by DPP and permutes.

The second operand is the instruction's left one, so that sums are transposed: lane l holds row ``l % 16`` of
a fragment and a run of neighbouring columns, those of its sixteen lanes ``l // 16``. A first operand is
spread likewise, so the sums of a product are operands of the next. RDNA3's instructions read operands from
both halves of a wave, which exchange theirs, and deal rows of sums out by turns: a permutation of the left
operand's rows makes runs of them (`ladder.lower.rocm.steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.dialect import BlockDialect
from ladder.lower.blocks.fragments import ROWS, FragmentShape
from ladder.lower.blocks.geometry import BlockGeometry
from ladder.lower.blocks.lanes import fragment_lanes
from ladder.lower.blocks.schedule import BlockSchedule
from ladder.lower.blocks.shared import CHUNK_ELEMENTS, SharedMemory
from ladder.lower.blocks.threads import Threads
from ladder.lower.blocks.values import SharedTile, Value
from ladder.lower.chain.rocm import RocmDialect
from ladder.lower.gpu.decode import Decoder
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.attention_loads import HIGH_HALVES, LOW_HALVES
from ladder.lower.rocm.decode import wave_decoder
from ladder.lower.rocm.steps import K_GROUPS, matrix_steps
from schedules.wave_attention import fragment_of
from targets import TileDevice

CHEAP = RocmDialect.cheap

OWN_LANE = 0xE4
"""DPP control: quad_perm [0, 1, 2, 3]."""

MOST_WORDS = 4
"""Words that one access of memory takes."""


def _sigmoid(x: Expr) -> Expr:
    """Return ``1 / (1 + exp(-x))``; an overflowing exponential gives the correct 0."""
    return _reciprocal(T.float32(1) + CHEAP["exp_ftz"](T.float32(0) - x))


def _reciprocal(x: Expr) -> Expr:
    return d.intrinsic("float32", "llvm.amdgcn.rcp", x)


class RocmBlocks(BlockDialect):
    """AMD GPUs with matrix instructions, of waves with 64 lanes or 32.

    operand: The 16-bit type of products.
    """

    address_type: ClassVar[str] = "int32"

    functions: ClassVar[Mapping[str, Callable[..., Expr]]] = {
        **RocmDialect.functions,
        "div": CHEAP["div"],
        "rsqrt": CHEAP["rsqrt"],
        "exp": CHEAP["exp_ftz"],
        "sigmoid": _sigmoid,
        "silu": lambda x: x * _sigmoid(x),
    }

    def __init__(self, device: TileDevice, shape: FragmentShape, operand: str) -> None:
        super().__init__(RocmDialect(device), shape)
        self.repeats = fragment_of(device).operands
        words = shape.run * self.repeats // 2
        self.step = next(step for step in matrix_steps(device, operand) if step.words == words)

    def launch(self, blocks: int, plan: BlockSchedule) -> tuple[Expr, Expr, Expr, Expr]:
        block, thread = d.launch(blocks, plan.warps * self.shape.lanes)
        # The same in all lanes, which the compiler does not see otherwise.
        warp = d.cross_lane("int32", "llvm.amdgcn.readfirstlane", thread // self.shape.lanes)
        return block, 0, thread, warp

    def count(self, iterations: Expr) -> Expr:
        """Return the same number, which LLVM does not know: it would unroll the loop, and load all ahead."""
        every = T.int32(0xF)
        moved = (T.Cast("int32", iterations), T.int32(OWN_LANE), every, every, T.bool(True))
        unknown = d.cross_lane("int32", "llvm.amdgcn.mov.dpp", *moved)
        return d.cross_lane("int32", "llvm.amdgcn.readfirstlane", unknown)

    def allocate(self, geo: BlockGeometry) -> tuple[Any, Any, Expr]:
        return d.shared(-(-geo.shared_bytes // 4)), None, T.int32(0)

    def address(self, byte: Expr) -> Expr:
        return T.int32(byte) if isinstance(byte, int) else byte

    def sync_block(self) -> None:
        d.block_sync(self.device)

    def sync_group(self, threads: Threads) -> None:
        if threads.plan.group_warps > 1 or threads.plan.groups == 1:
            d.block_sync(self.device)
        else:
            d.wave_sync(self.device)

    # ---- accesses ------------------------------------------------------------------------------------
    def read(self, shared: SharedMemory, place: Expr, count: int, dtype: str = "uint32") -> list[Expr]:
        words, first = b.local(count, "uint32"), b.bind(place // 4)
        for at in range(0, count, MOST_WORDS):
            d.load(words, shared.words, first + at, width=min(MOST_WORDS, count - at), at=at)
        found = [words[i] for i in range(count)]
        if dtype == "uint16":
            return [T.Cast("uint16", found[0] >> T.Cast("uint32", place % 4 * 8))]
        return found if dtype == "uint32" else [d.as_type(word, dtype) for word in found]

    def write(self, shared: SharedMemory, place: Expr, registers: Sequence[Expr]) -> None:
        words, first = [d.as_type(x, "uint32") for x in registers], b.bind(place // 4)
        for at in range(0, len(words), MOST_WORDS):
            part = words[at : at + MOST_WORDS]
            b.store(shared.words, d.vector(part), d.lanes(first + at, len(part)))

    def load(self, buffer: Any, at: Expr, count: int, dtype: str) -> list[Expr]:
        registers = b.local(count, dtype)
        if dtype == "uint16":
            b.store(registers, T.reinterpret("uint16", buffer[at]), 0)
        else:
            each = 1 if str(buffer.dtype) in ("uint32", "float32") else 2
            for i in range(0, count, MOST_WORDS):
                words = min(MOST_WORDS, count - i)
                loaded = buffer[d.lanes(at + i * each, words * each)]
                kind = dtype if words == 1 else f"{dtype}x{words}"
                b.store(registers, d.as_type(loaded, kind), d.lanes(i, words))
        return [registers[i] for i in range(count)]

    def store(self, buffer: Any, at: Expr, elements: Sequence[Expr]) -> None:
        dtype, count = str(buffer.dtype), len(elements)
        if count == 1:
            b.store(buffer, self.chain.rounded(elements[0], dtype), at)
        elif dtype == "float32":
            for i in range(0, count, MOST_WORDS):
                part = list(elements[i : i + MOST_WORDS])
                b.store(buffer, d.vector(part), d.lanes(at + i, len(part)))
        else:
            words = [self.pack(elements[i], elements[i + 1], dtype) for i in range(0, count, 2)]
            b.store(buffer, d.as_type(d.vector(words), f"{dtype}x{count}"), d.lanes(at, count))

    # ---- registers -----------------------------------------------------------------------------------
    def reciprocal(self, x: Expr) -> Expr:
        return _reciprocal(x)

    # ---- matrix instructions -------------------------------------------------------------------------
    def _own_words(self, tile: SharedTile, row: Expr, column: Expr) -> list[Expr]:
        """Return a lane's elements of 16 columns of a row: those of its sixteen lanes."""
        chunk, within = fragment_lanes(tile.context.lanes).chunk(column)
        place = tile.base + (tile.layout.byte(row, chunk) + within)
        return self.read(tile.context.shared, place, self.shape.run // 2)

    def fragment_words(self, tile: SharedTile, m: int, n: Expr) -> list[Expr]:
        key = (tile.name, "own", m, n)
        return list(tile.context.point.once(key, lambda: self._own_words(tile, tile.rows(m)[0], n)))

    def operand_a(self, tile: SharedTile, m: int, k: int) -> list[Expr]:
        return self._whole(self.fragment_words(tile, m, k), tile.context.threads.lane)

    def _left_row(self, lane: Expr) -> Expr:
        return d.left_row(lane % ROWS, self.repeats, self.shape.run)

    def operand_b(self, tile: SharedTile, k: int, n: Expr, count: int, transposed: bool) -> list[list[Expr]]:
        lane = tile.context.threads.lane
        found = []
        for i in range(count):
            column = b.bind(fragment_lanes(tile.context.lanes).column(n + i, self._left_row(lane)))
            words = self._own_words(tile, column, k) if transposed else self._column(tile, k, column)
            found.append(self._whole(words, lane))
        return found

    def _column(self, tile: SharedTile, k: int, column: Expr) -> list[Expr]:
        """Return a lane's elements of 16 rows of a column, which lie in as many words."""
        run, context = self.shape.run, tile.context
        first = b.bind(fragment_lanes(context.lanes).column(k, context.threads.lane // ROWS * run))
        within = column % CHUNK_ELEMENTS // 2 * 4
        places = (tile.layout.byte(first + i, column // CHUNK_ELEMENTS) + within for i in range(run))
        words = [self.read(context.shared, tile.base + place, 1)[0] for place in places]
        chosen = b.bind(T.Select(column % 2 == 0, T.uint32(LOW_HALVES), T.uint32(HIGH_HALVES)))
        return [
            d.intrinsic("uint32", "llvm.amdgcn.perm", words[i + 1], words[i], chosen)
            for i in range(0, run, 2)
        ]

    def _whole(self, words: Sequence[Expr], lane: Expr) -> list[Expr]:
        """Return an operand, with what the other half of the wave has where instructions take both."""
        own = [b.bind(word) for word in words]
        return own if self.repeats == 1 else d.with_other_half(own, lane < ROWS)

    def packed_operand(self, fragments: Sequence[Sequence[Expr]], dtype: str, lane: Expr) -> list[Expr]:
        (part,) = fragments
        return self._whole([self.pack(part[i], part[i + 1], dtype) for i in range(0, len(part), 2)], lane)

    def keep_order(self) -> None:
        if self.shape.few_registers:
            d.schedule_fence()

    # ---- packed weights ------------------------------------------------------------------------------
    def decoder(self, gemm: Gemm) -> Decoder:
        return wave_decoder(gemm, self.device)

    def packed_row(self, lane: Expr) -> Expr:
        row = self._left_row(lane)
        return row // 8 * ROWS + row % 8

    def _k_groups(self, lane: Expr) -> list[Expr]:
        """Return which of the four threads that share a packed row a lane takes the words of."""
        groups, place = self.shape.lanes // ROWS // self.repeats, lane // ROWS
        return [i * groups + (place if groups > 1 else 0) for i in range(K_GROUPS // groups)]

    def packed_holders(self, lane: Expr) -> list[Expr]:
        row = self._left_row(lane)
        return [row // 8 * 32 + row % 8 * K_GROUPS + group for group in self._k_groups(lane)]

    def operand_a_beside_packed(self, first: Value, m: int, k: int) -> list[Expr]:
        assert isinstance(first, SharedTile), f"%{first.name}: `BlockGeometry` checks it"
        context = first.context
        row, found = first.rows(m)[0], list[Expr]()
        for group in self._k_groups(context.threads.lane):
            for half in range(2):
                byte = first.layout.byte(row, 2 * k + half) + group * 4
                found += self.read(context.shared, first.base + byte, 1)
        return [b.bind(word) for word in found]

    def multiply(self, sums: Any, at: int, a: Sequence[Expr], second: Sequence[Expr]) -> None:
        self.step.perform("", sums, range(at, at + self.shape.run), list(second), list(a), None)
        if self.step.feature.startswith("wmma"):
            d.finish_here(sums, at, self.shape.run)
