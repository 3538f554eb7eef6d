"""Products on an AMD GPU of this machine, through `ladder.runtime.hip`: results, and times of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ladder.cli.comparison import checked
from ladder.cli.measure import ceiling, copies_for
from ladder.runtime import hip

if TYPE_CHECKING:
    import torch

    from ladder.api.lowered import Lowered
    from ladder.cli.operands import Operands
    from ladder.cli.report import GemmReport
    from ladder.runtime.packed import PackedWeight
    from targets import TileDevice

ROUNDS = 20
"""Launches per copy of the weight that are timed together."""


class HostLaunch:
    """A kernel that is called with sizes and tensors on the CPU, whose copies on the GPU are its arguments.

    entry: The host part of the kernel.
    copies: Copies of the arguments that a timed run takes in turn, 0 for no timing.
    results: How many of the last arguments it writes.
    """

    def __init__(self, entry: Any, copies: int = 0, results: int = 1) -> None:
        self.entry, self.copies, self.results, self.microseconds = entry, copies, results, 0.0

    def __call__(self, *given: Any) -> None:
        from ladder.simulate.operator import numpy_of

        values = [x if isinstance(x, int) else numpy_of(x) for x in given]
        arrays = [x for x in values if not isinstance(x, int)]
        with hip.on_device(hip.runtime(), arrays) as (held, placed):
            self.entry(*_in_place(values, placed))
            for array, result in zip(arrays[-self.results :], held[-self.results :], strict=True):
                array[...] = result.fetch()
        if self.copies:
            self._time(values)

    def _time(self, values: Sequence[int | np.ndarray[Any, Any]]) -> None:
        """Note the mean time of a launch, each with arguments that the caches have lost."""
        device, arrays = hip.runtime(), [x for x in values if not isinstance(x, int)]
        with hip.on_device(device, arrays * self.copies) as (_, placed):
            count = len(arrays)
            calls = [_in_place(values, placed[at : at + count]) for at in range(0, len(placed), count)]

            def work() -> None:
                for _ in range(ROUNDS):
                    for arguments in calls:
                        self.entry(*arguments)

            work()
            self.microseconds = device.milliseconds(work) * 1e3 / (ROUNDS * len(calls))


def _in_place(values: Sequence[Any], placed: Sequence[Any]) -> list[Any]:
    """Return arguments with what lies on the GPU in place of each array."""
    rest = iter(placed)
    return [x if isinstance(x, int) else next(rest) for x in values]


def multiply(
    lowered: Lowered, operands: Operands, packed: PackedWeight, copies: int
) -> tuple[torch.Tensor, float]:
    """Run the kernel that serves the operands' rows; return its result, on the CPU, and its µs (or 0).

    Raises DeviceError if the runtime refuses anything; in its words.
    """
    from ladder.runtime.build import load_entry
    from ladder.runtime.kernel import CompiledGemm
    from ladder.runtime.packed import own_order

    m = len(operands.x)
    kernel = lowered.kernel(m)
    launch = HostLaunch(load_entry(kernel, "rocm"), copies)
    gemm, target = lowered.request.gemm, lowered.request.target
    called = CompiledGemm(gemm, "cuda", [m], [launch], own_order(gemm, target))
    result = called(operands.x, packed, operands.bias, operands.token_scale)
    return result, launch.microseconds


def with_run(
    report: GemmReport,
    lowered: Lowered,
    operands: Operands,
    packed: PackedWeight,
    *,
    check: bool,
    timed: bool,
) -> GemmReport:
    """Add what a run on the GPU gives: its error against float64, its time, its share of the roofline."""
    device: TileDevice = lowered.request.target
    copies = copies_for(packed.nbytes, device) if timed and len(operands.x) else 0
    result, microseconds = multiply(lowered, operands, packed, copies)
    if check:
        report = checked(report, operands, lowered.request.gemm, result)
    if not copies:
        return report
    limit = ceiling(device, report.activation)
    share = limit.seconds(report.bytes, report.flops) * 1e6 / microseconds
    return replace(
        report, time_us=round(microseconds, 3), roofline_fraction=round(share, 6), roofline=limit.source
    )
