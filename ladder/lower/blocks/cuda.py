"""Block graphs on NVIDIA GPUs: accesses by PTX, ``ldmatrix`` and ``mma.m16n8k16``, named barriers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.dialect import BlockDialect
from ladder.lower.blocks.fragments import ROWS, FragmentShape, hold, zeros
from ladder.lower.blocks.geometry import BlockGeometry
from ladder.lower.blocks.schedule import BlockSchedule
from ladder.lower.blocks.shared import SharedMemory
from ladder.lower.blocks.threads import Threads
from ladder.lower.blocks.values import SharedTile, Value
from ladder.lower.chain.cuda import CudaDialect
from ladder.lower.cuda.functions import LOG2_E, exponential, special
from ladder.lower.gpu.decode import Decoder, make_decoder
from ladder.lower.gpu.instructions import select_step
from targets import TileDevice

RESIDENT_BLOCKS = 1
"""Blocks that a multiprocessor must be able to hold: leaves a thread as many registers as there are."""

NAMES = {"float32": "f32", "uint32": "u32", "uint16": "u16"}


def sigmoid(x: Expr) -> Expr:
    """Return ``1 / (1 + exp(-x))``; an overflowing exponential gives the correct 0."""
    return special("reciprocal", T.float32(1) + special("power_of_two", x * T.float32(-LOG2_E)))


def silu(x: Expr) -> Expr:
    """Return ``x / (1 + exp(-x))``."""
    return x * sigmoid(x)


class CudaBlocks(BlockDialect):
    """NVIDIA GPUs from compute capability 8.0 on.

    operand: The 16-bit type of products.
    """

    address_type: ClassVar[str] = "uint32"

    functions: ClassVar[Mapping[str, Callable[..., Expr]]] = {
        "exp": exponential,
        "sigmoid": sigmoid,
        "silu": silu,
    }

    def __init__(self, device: TileDevice, shape: FragmentShape, operand: str) -> None:
        super().__init__(CudaDialect(device), shape)
        self.instruction = select_step(device, operand)

    def launch(self, blocks: int, plan: BlockSchedule) -> tuple[Expr, Expr, Expr, Expr]:
        b.device(RESIDENT_BLOCKS)
        (block,) = b.block_index([blocks * plan.cluster])
        rank: Expr = b.keep(b.cluster_rank([plan.cluster])[0]) if plan.cluster > 1 else 0
        block = b.keep(block // plan.cluster) if plan.cluster > 1 else block
        thread = b.thread_index(plan.warps * self.shape.lanes)
        return block, rank, thread, thread // self.shape.lanes

    def allocate(self, geo: BlockGeometry) -> tuple[Any, Any, Expr]:
        pool = b.SharedPool()
        size = geo.shared_bytes - 8 * geo.barriers
        words = pool.alloc((-(-size // 4),), "uint32", align=geo.alignment)
        arrivals = pool.alloc((geo.barriers,), "uint64", align=8) if geo.barriers else None
        pool.commit()
        base = b.Variable("uint32", T.cuda.cvta_generic_to_shared(words.ptr_to([0]))).value
        return words, arrivals, base

    def address(self, byte: Expr) -> Expr:
        return T.uint32(byte) if isinstance(byte, int) else T.Cast("uint32", byte)

    def sync_block(self) -> None:
        b.block_sync()

    def sync_group(self, threads: Threads) -> None:
        plan = threads.plan
        if plan.group_warps == 1:
            b.emit(T.cuda.warp_sync())
        elif plan.groups == 1:
            b.block_sync()
        else:
            count = T.uint32(plan.group_warps * self.shape.lanes)
            b.ptx("bar.sync", T.Cast("uint32", threads.group + 1), count)

    # ---- accesses ------------------------------------------------------------------------------------
    def read(self, shared: SharedMemory, place: Expr, count: int, dtype: str = "uint32") -> list[Expr]:
        registers = b.local(count, dtype)
        found = [registers[i] for i in range(count)]
        b.ptx(f"ld.shared{_vector(count)}.{NAMES[dtype]}", *found, place)
        return found

    def write(self, shared: SharedMemory, place: Expr, registers: Sequence[Expr]) -> None:
        dtype = str(registers[0].ty.dtype)
        b.ptx(f"st.shared{_vector(len(registers))}.{NAMES[dtype]}", place, *registers)

    def load(self, buffer: Any, at: Expr, count: int, dtype: str) -> list[Expr]:
        # By name: the compiler may move plain loads to before the kernels before have ended.
        registers = b.local(count, dtype)
        found = [registers[i] for i in range(count)]
        b.ptx(f"ld.global{_vector(count)}.{NAMES[dtype]}", *found, buffer.ptr_to([at]))
        return found

    def store(self, buffer: Any, at: Expr, elements: Sequence[Expr]) -> None:
        dtype = str(buffer.dtype)
        results = b.local(len(elements), dtype)
        for i, element in enumerate(elements):
            b.store(results, T.Cast(dtype, element), i)
        with b.vector(len(elements)) as lane:
            b.store(buffer, results[lane], at + lane)

    # ---- registers -----------------------------------------------------------------------------------
    def rounded(self, value: Expr, dtype: str) -> Expr:
        return T.Cast("float32", T.Cast(dtype, value))

    def reciprocal(self, x: Expr) -> Expr:
        return special("reciprocal", x)

    # ---- matrix instructions -------------------------------------------------------------------------
    def fragment_words(self, tile: SharedTile, m: int, n: Expr) -> list[Expr]:
        context = tile.context
        if isinstance(n, int) and tile.shape[0] > 1 and tile.shape[1] % ROWS == 0:
            return tile.operand_a(m, n // 2)[n % 2 * 2 :][:2]
        lane, words = context.threads.lane, []
        for row in tile.rows(m):
            place = tile.base + T.Cast("uint32", tile.layout.byte(row, n) + lane % 4 * 4)
            words += self.read(context.shared, place, 1)
        return words if len(words) == 2 else words * 2

    def operand_a(self, tile: SharedTile, m: int, k: int) -> list[Expr]:
        context, rows = tile.context, tile.shape[0]
        lane, first = context.threads.lane, context.first_row(rows)
        place = context.point.register(
            ("a", tile.layout, rows, m),
            lambda: _byte(tile, T.min(first + m * ROWS + lane % 16, rows - 1), lane // 16),
        )
        return _matrices(tile, place, (0, 2 * k), 4, "")

    def operand_b(self, tile: SharedTile, k: int, n: Expr, count: int, transposed: bool) -> list[list[Expr]]:
        lane, point = tile.context.threads.lane, tile.context.point
        if transposed:
            row, chunk = lane % 8 + lane // 16 * 8, lane // 8 % 2
            place = point.register(("bt", tile.layout), lambda: _byte(tile, row, chunk))
            # Rows further: a number, or one that the layout cannot fold.
            offset = (n * 8, 2 * k)
        else:
            place = point.register(("b", tile.layout), lambda: _byte(tile, lane % 16, lane // 16))
            offset = (k * ROWS, n)
        # The lanes of the second fragment give addresses that one fragment alone ignores.
        words = _matrices(tile, place, offset, 2 * count, "" if transposed else ".trans")
        return [words[2 * i :][:2] for i in range(count)]

    def packed_operand(self, fragments: Sequence[Sequence[Expr]], dtype: str, lane: Expr) -> list[Expr]:
        return [self.pack(part[2 * i], part[2 * i + 1], dtype) for part in fragments for i in range(2)]

    def multiply(self, sums: Any, at: int, a: Sequence[Expr], second: Sequence[Expr]) -> None:
        self.instruction.emit("", sums, at, list(a), list(second))

    # ---- packed weights ------------------------------------------------------------------------------
    def decoder(self, gemm: Gemm) -> Decoder:
        return make_decoder(gemm, self.device, gains=True)

    def packed_row(self, lane: Expr) -> Expr:
        return lane // 4

    def packed_holders(self, lane: Expr) -> list[Expr]:
        return [lane]

    def operand_a_beside_packed(self, first: Value, m: int, k: int) -> list[Expr]:
        return first.operand_a(m, k)

    def sums_of_squares(self, root: Any, m: int) -> list[Expr] | None:
        """Return the diagonal of ``x · x^T``.

        The registers of eight rows as an A operand are those of the same rows as columns of a B operand. A
        product of 16 elements takes two instructions where squares and sums take 24.
        """
        parts, lane = [], root.context.threads.lane
        for half in range(2 if root.shape[0] > ROWS // 2 else 1):
            sums = zeros(4)
            for k in range(root.shape[1] // ROWS):
                a = root.operand_a(m, k)
                self.multiply(sums, 0, a, [a[half], a[half + 2]])
            own = T.Select(lane // 4 % 2 == 0, sums[2 * half], sums[2 * half + 1])
            parts.append(hold(T.Select(lane % 4 == lane // 8, own, T.float32(0))))
        return parts if len(parts) == 2 else parts * 2


def _vector(count: int) -> str:
    return "" if count == 1 else f".v{count}"


def _byte(tile: SharedTile, row: Expr, chunk: Expr) -> Expr:
    return T.Cast("uint32", tile.layout.byte(row, chunk))


def _matrices(tile: SharedTile, place: Expr, offset: tuple[Expr, Expr], count: int, mode: str) -> list[Expr]:
    words = b.local(count, "uint32")
    registers = [words[i] for i in range(count)]
    b.ptx(
        f"ldmatrix.sync.aligned.m8n8.x{count}{mode}.shared.b16",
        *registers,
        tile.layout.moved(tile.start(place), *offset),
    )
    return registers
