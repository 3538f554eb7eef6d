"""Decisions about a kernel of the pipeline ``wgmma`` before any of it is emitted."""

from __future__ import annotations

from dataclasses import dataclass

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.wgmma_geometry import WgmmaGeometry
from ladder.lower.gpu.decode import Decoder, make_decoder
from schedules.legal import check_legal
from schedules.schedule import GpuSchedule
from targets import TileDevice


def scaled_decoder(gemm: Gemm, device: TileDevice, room: int = 0) -> Decoder:
    """Return the decoder of a problem's operands, which leaves nothing to the finished sums.

    ``room`` is the shared memory in bytes of the table that it may have: few types have something cheaper.
    """
    decoder = make_decoder(gemm, device, table=room, gains=gemm.scale)
    return decoder if decoder.gains == (1.0, 1.0) else make_decoder(gemm, device, table=room)


def byte_decoder(gemm: Gemm, device: TileDevice, room: int = 0) -> Decoder:
    """Return the decoder of 8-bit operands; parameters as of `scaled_decoder`.

    It leaves gains to the sums, but not offsets and zero points, which would need the sums of x as well.
    """
    raw = make_decoder(gemm, device, "accumulator", table=room)
    zeros_left = gemm.zero != "none" and not raw.subtracts_zeros
    return make_decoder(gemm, device, table=room) if zeros_left or any(raw.offsets) else raw


@dataclass(frozen=True)
class Spec:
    """The problem, the device, the schedule, the sizes that follow, and how weights become operands."""

    gemm: Gemm
    device: TileDevice
    schedule: GpuSchedule
    geo: WgmmaGeometry
    decoder: Decoder

    @property
    def integer(self) -> bool:
        """Whether sums are integers; TIR types those of wgmma as untyped 32-bit registers."""
        return self.gemm.activation == "int8"

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.geo.m64 * self.geo.accumulators


def choose_spec(
    gemm: Gemm, device: TileDevice, schedule: GpuSchedule, geometry: type[WgmmaGeometry] = WgmmaGeometry
) -> Spec:
    """Return the sizes, of the class ``geometry``, and the decoder of a kernel.

    Raises ScheduleError if the device lacks the instructions, or the schedule does not fit problem or device;
        names the rule.
    """
    check_legal(gemm, device, schedule)
    geo = geometry(gemm, schedule)
    choose = byte_decoder if geo.groups.lane == 8 else scaled_decoder
    return Spec(gemm, device, schedule, geo, choose(gemm, device, geo.table_bytes))


@dataclass(frozen=True)
class MathThread:
    """Its warpgroup, its place in that, its warp in the warpgroup, and the lane in the warp."""

    group: Expr
    group_thread: Expr
    warp: Expr
    lane: Expr


def find_math_thread(thread: Expr) -> MathThread:
    """Emit where a thread of the block stands among the math warpgroups."""
    group, group_thread = b.bind(thread // 128), b.bind(thread % 128)
    return MathThread(group, group_thread, b.bind(group_thread // 32), b.bind(group_thread % 32))
