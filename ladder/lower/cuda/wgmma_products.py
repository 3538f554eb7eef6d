"""Products of the wgmma pipeline, and how math warps wait for stages and leave them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda import barriers
from ladder.lower.cuda.barriers import Ring
from ladder.lower.cuda.bulk_copies import SWIZZLE_128
from ladder.lower.cuda.wgmma_geometry import Spec
from ladder.lower.cuda.wgmma_grid import Grid
from ladder.lower.cuda.wgmma_memory import Memory
from ladder.lower.gpu.instructions import PTX_FP8

INSTRUCTIONS = {
    "float16": "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16",
    "bfloat16": "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16",
    "int8": "wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8",
    "fp8_e4m3": "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{w}.e4m3",
    "fp8_e5m2": "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{w}.e5m2",
}

MODIFIERS: dict[str, tuple[int, ...]] = {"int8": (), "float16": (1, 1, 0), "bfloat16": (1, 1, 0)}
"""Floating types take signs of both operands (1, 1); 16-bit types also a transposition of x."""

DESCRIPTOR_HIGH = 1 << 30 | 64
"""Upper half of x's matrix descriptor: 128-byte swizzle, 1024 bytes between groups of eight rows."""


class Descriptor:
    """The matrix descriptor of x.

    x: The stages of x in shared memory.
    """

    def __init__(self, spec: Spec, x: Any) -> None:
        self.spec = spec
        descriptor = b.local(1, "uint64")
        b.emit(
            T.cuda.wgmma.encode_matrix_descriptor(
                descriptor.ptr_to([0]), x.ptr_to([0, 0]), 1, 64, SWIZZLE_128
            )
        )
        self.low = b.Variable("uint32", T.Cast("uint32", descriptor[0]))

    def at(self, stage: Expr, within: int, step: int, m: int = 0) -> Expr:
        """Return the descriptor at a step of slab ``within`` of a stage, from activation row ``m`` on."""
        start = T.Cast("uint32", stage) * T.uint32(self.spec.geo.x_bytes >> 4)
        inside = (within * self.spec.schedule.tile_m + m) * 128 + step * 32
        low = self.low.value + start + T.uint32(inside >> 4)
        return T.Cast("uint64", low) | T.uint64(DESCRIPTOR_HIGH << 32)


def start_product(
    spec: Spec, sums: list[Expr], registers: list[Expr], descriptor: Expr, accumulate: Expr
) -> None:
    """Start one product; ``accumulate`` says whether it adds to the sums or overwrites them."""
    activation = spec.gemm.activation
    operand = PTX_FP8.get(spec.decoder.operand, "")
    spelling = INSTRUCTIONS[activation].format(n=2 * len(sums), w=operand)
    adds = T.bool(accumulate) if isinstance(accumulate, bool) else accumulate
    b.ptx(spelling, *sums, *registers, descriptor, adds, *MODIFIERS.get(activation, (1, 1)))


def start_step(
    spec: Spec, sums: Any, registers: Callable[[int], list[Expr]], descriptor: Expr, adds: Expr
) -> None:
    """Start the products of a step of K: one for each 64 weight rows, whose number ``registers`` takes."""
    for m in range(spec.geo.m64):
        first = m * spec.geo.accumulators
        own = [sums[first + i] for i in range(spec.geo.accumulators)]
        start_product(spec, own, registers(m), descriptor, adds)


def open_group() -> None:
    """Emit what comes before the products of a commit group."""
    b.emit(T.ptx.wgmma.fence.sync.aligned())


def commit_group() -> None:
    """Close a commit group."""
    b.emit(T.ptx.wgmma.commit_group.sync.aligned())


def wait_groups(pending: int) -> None:
    """Wait until at most ``pending`` commit groups still run."""
    b.emit(T.ptx.wgmma.wait_group.sync.aligned(pending))


def pin_registers(buffer: Any, count: int, first: int = 0) -> None:
    """Keep reads of wgmma results behind the wait: the compiler sees each register rewritten here."""
    integer = str(buffer.dtype) == "uint32"
    kind, constraint = ("unsigned", "r") if integer else ("float", "f")
    name = f"ladder_pin_{kind}{count}"
    source = (
        f"__device__ __forceinline__ void {name}({kind}* p) {{\n#pragma unroll\n"
        f'  for (int i = 0; i < {count}; ++i) asm volatile("" : "+{constraint}"(p[i]) :: "memory");\n}}\n'
    )
    b.emit(b.call_inline(name, source, "void", buffer.ptr_to([first])))


class Consumer:
    """The math warps' walk around the ring.

    lane: Lane of the warp.
    """

    def __init__(self, spec: Spec, grid: Grid, memory: Memory, lane: Expr) -> None:
        self.spec, self.grid, self.memory, self.lane = spec, grid, memory, lane
        self.ring = Ring(spec.schedule.stages)
        self.previous, self.finished = b.Variable("int32", 0), b.Variable("int32", 0)
        """The stage that is freed next, and the last one whose products were started."""

    def await_stage(self) -> None:
        """Wait until the ring's current stage is full."""
        self.ring.await_full(self.memory.full)

    def enter_stage(self, iteration: Expr, iterations: Expr, slab: int) -> None:
        """Wait for the stage of a slab of ``iteration``, one of ``iterations``, or of the next one.

        Where the tile ends, the stage at hand is entered again and fetched in vain: in a branch
        ptxas would give registers that products in flight still read to other values.
        """
        if slab < self.spec.geo.body:
            self.ring.advance()
        else:
            self.ring.advance_if(iteration + 1 < iterations)
        self.await_stage()

    def release(self) -> None:
        """Tell every producer that writes to this block that this warp left the previous stage."""
        empty, cluster = self.memory.empty.ptr_to([self.previous.value]), self.spec.schedule.cluster
        if cluster == 1:
            with b.when(self.lane == 0):
                barriers.arrive(empty)
            return
        with b.when(self.lane < cluster):
            rank = self.grid.slice * cluster + self.lane
            barriers.arrive_at(empty, rank)
