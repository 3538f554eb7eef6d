"""Interface to vendor-specific code of block graphs: launches, shared memory, matrix instructions, functions.

A vendor's table of these is a `BlockDialect`; all other modules emit the same kernel in each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.analysis import BlockProgram
from ladder.lower.blocks.fragments import FragmentShape
from ladder.lower.blocks.geometry import BlockGeometry
from ladder.lower.blocks.schedule import BlockSchedule
from ladder.lower.blocks.shared import SharedMemory
from ladder.lower.blocks.threads import Threads
from ladder.lower.chain.dialect import Dialect
from ladder.lower.gpu.decode import Decoder

if TYPE_CHECKING:
    from ladder.lower.blocks.values import SharedTile, Value

Combine = Callable[[Expr, Expr], Expr]


class BlockDialect(ABC):
    """How one vendor's kernels of block graphs are written."""

    address_type: ClassVar[str]
    """Type of addresses in shared memory."""

    functions: ClassVar[Mapping[str, Callable[..., Expr]]]
    """Operators that are computed otherwise than the operator table says, within 2^-21."""

    def __init__(self, chain: Dialect, shape: FragmentShape) -> None:
        self.chain, self.device, self.shape = chain, chain.device, shape

    # ---- launch and shared memory --------------------------------------------------------------------
    @abstractmethod
    def launch(self, blocks: int, plan: BlockSchedule) -> tuple[Expr, Expr, Expr, Expr]:
        """Begin the device part. Return block (of a cluster the same), rank in it, thread and warp."""

    def threads(self, program: BlockProgram, plan: BlockSchedule) -> Threads:
        """Declare the launch, and compute a thread's indices."""
        block, rank, thread, warp = self.launch(program.blocks, plan)
        width = self.shape.lanes
        lane = b.bind(thread % width)
        warp = b.bind(warp)
        group: Expr = b.keep(warp // plan.group_warps) if plan.groups > 1 else 0
        row_warp: Expr = b.keep(warp % plan.row_warps) if plan.row_warps > 1 else 0
        within = warp % plan.group_warps // plan.row_warps
        column_warp: Expr = b.keep(within) if plan.column_warps > 1 else 0
        group_thread = b.bind(thread % (plan.group_warps * width))
        worker = b.keep(rank * plan.groups + group)
        iterations: Expr = program.steps // plan.sharers
        if program.steps % plan.sharers:
            iterations = b.keep((program.steps - worker + plan.sharers - 1) // plan.sharers)
        places = block, rank, thread, warp, lane, group, group_thread, row_warp, column_warp, worker
        return Threads(plan, *places, self.count(iterations))

    def count(self, iterations: Expr) -> Expr:
        """Return how often a loop is repeated as the loop takes it."""
        return iterations

    def shared_memory(self, geo: BlockGeometry, threads: Threads) -> SharedMemory:
        """Allocate what a kernel needs."""
        words, arrivals, base = self.allocate(geo)
        stage = b.Variable(self.address_type, self.address(0))
        at: Expr = 0
        if geo.stage_offsets:
            at = b.keep(geo.offsets["stages"] + threads.group * (threads.plan.stages * geo.stage_bytes))
        return SharedMemory(words, arrivals, base, stage, at)

    @abstractmethod
    def allocate(self, geo: BlockGeometry) -> tuple[Any, Any, Expr]:
        """Allocate shared memory. Return its words, barriers of tensor copies or None, and its address."""

    @abstractmethod
    def address(self, byte: Expr) -> Expr:
        """Return a number of bytes, an int32, as the type of addresses in shared memory."""

    @abstractmethod
    def sync_block(self) -> None:
        """Emit a barrier of the block that accesses of shared memory do not cross."""

    @abstractmethod
    def sync_group(self, threads: Threads) -> None:
        """Emit the same for the warps of a group."""

    # ---- accesses ------------------------------------------------------------------------------------
    @abstractmethod
    def read(self, shared: SharedMemory, place: Expr, count: int, dtype: str = "uint32") -> list[Expr]:
        """Emit one load of ``count`` 32-bit registers, or of one uint16, from an address in shared memory."""

    @abstractmethod
    def write(self, shared: SharedMemory, place: Expr, registers: Sequence[Expr]) -> None:
        """Emit one store of 32-bit registers of one type to an address in shared memory."""

    @abstractmethod
    def load(self, buffer: Any, at: Expr, count: int, dtype: str) -> list[Expr]:
        """Emit one load from device memory: registers of a type, filled from the element ``at`` on."""

    @abstractmethod
    def store(self, buffer: Any, at: Expr, elements: Sequence[Expr]) -> None:
        """Round float32 to a buffer's neighbouring elements, and store them at once."""

    # ---- registers -----------------------------------------------------------------------------------
    def pack(self, low: Expr, high: Expr, dtype: str) -> Expr:
        """Return two floats rounded to 16 bits in one uint32 register."""
        return b.Variable("uint32", self.chain.rounded_pair(low, high, dtype)).value

    def widened(self, bits: Expr, dtype: str) -> Expr:
        """Return the float32 of a 16-bit float, given as uint16."""
        return self.chain.widened(bits, dtype, "float32")

    def unpack(self, word: Expr, dtype: str) -> list[Expr]:
        """Return the two halves of a register as float32."""
        halves = (T.Cast("uint16", word & T.uint32(0xFFFF)), T.Cast("uint16", word >> T.uint32(16)))
        return [self.widened(half, dtype) for half in halves]

    def rounded(self, value: Expr, dtype: str) -> Expr:
        """Return a float32 rounded to a 16-bit type, as a float32."""
        return self.chain.rounded_through(value, dtype, b.bind)

    @abstractmethod
    def reciprocal(self, x: Expr) -> Expr:
        """Return the reciprocal of a float32."""

    def exponential(self, x: Expr) -> Expr:
        """Return ``exp(x)`` of a float32; subnormal results are 0."""
        return self.chain.cheap["exp_ftz"](x)

    def greater(self, x: Expr, y: Expr) -> Expr:
        """Return the maximum of two float32, NaN if one is."""
        return self.chain.functions["maximum"](x, y)

    def over_lanes(self, value: Expr, combine: Combine, distances: Sequence[int], lane: Expr) -> Expr:
        """Combine a float32 with those of lanes at distances, powers of two that ascend; all get it."""
        total = b.Variable("float32", value)
        for distance in distances:
            total.set(combine(total.value, self.chain.shuffle(total.value, distance, lane)))
        return total.value

    # ---- matrix instructions -------------------------------------------------------------------------
    @abstractmethod
    def fragment_words(self, tile: SharedTile, m: int, n: Expr) -> list[Expr]:
        """Return a lane's 16-bit elements of a fragment of a tile, in registers of two."""

    @abstractmethod
    def operand_a(self, tile: SharedTile, m: int, k: int) -> list[Expr]:
        """Return the registers of a tile as a first operand: rows of fragment m, 16 columns from 16 k on."""

    @abstractmethod
    def operand_b(self, tile: SharedTile, k: int, n: Expr, count: int, transposed: bool) -> list[list[Expr]]:
        """Return the registers of ``count`` fragments of columns as second operands (`Value.operand_b`)."""

    @abstractmethod
    def packed_operand(self, fragments: Sequence[Sequence[Expr]], dtype: str, lane: Expr) -> list[Expr]:
        """Return a first operand of 16 columns: the float32 elements of the fragments that they are."""

    @abstractmethod
    def multiply(self, sums: Any, at: int, a: Sequence[Expr], second: Sequence[Expr]) -> None:
        """Emit ``sums[at:] += a · second`` for one fragment."""

    def keep_order(self) -> None:  # noqa: B027 (nothing, unless a vendor's compiler needs it)
        """Keep the compiler from moving later loads and decoding before this place, where it would spill."""

    # ---- packed weights ------------------------------------------------------------------------------
    @abstractmethod
    def decoder(self, gemm: Gemm) -> Decoder:
        """Return what decodes a product's packed words to its second operands."""

    @abstractmethod
    def packed_row(self, lane: Expr) -> Expr:
        """Return which of the rows of two fragments a lane's words are of; 8 further are the other half."""

    @abstractmethod
    def packed_holders(self, lane: Expr) -> list[Expr]:
        """Return whose words a lane decodes, among the threads that own those of two fragments."""

    @abstractmethod
    def operand_a_beside_packed(self, first: Value, m: int, k: int) -> list[Expr]:
        """Return a first operand whose columns come in the order of packed words.

        Raises ScheduleError if the value is not spread so.
        """

    def sums_of_squares(self, root: Any, m: int) -> list[Expr] | None:
        """Return a lane's parts of its rows' sums of squares by products, or None if that does not pay."""
        return None
