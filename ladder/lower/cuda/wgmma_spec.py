"""Decisions about a kernel of the pipeline ``wgmma`` before any of it is emitted."""

from __future__ import annotations

from dataclasses import dataclass

from ladder.ir.gemm import Gemm
from ladder.lower.cuda.wgmma_decode import ScaledDecoder, byte_decoder, scaled_decoder
from ladder.lower.cuda.wgmma_geometry import WgmmaGeometry
from schedules.legal import check_legal
from schedules.schedule import GpuSchedule
from targets import TileDevice


@dataclass(frozen=True)
class Spec:
    """The problem, the device, the schedule, the sizes that follow, and how weights become operands."""

    gemm: Gemm
    device: TileDevice
    schedule: GpuSchedule
    geo: WgmmaGeometry
    decoder: ScaledDecoder

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
    choose = byte_decoder if geo.lane == 8 else scaled_decoder
    return Spec(gemm, device, schedule, geo, choose(gemm, device, geo.table_bytes))
