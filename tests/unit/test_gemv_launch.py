"""gemv starts before the kernel ahead of it has ended, and touches nothing of it until it waits."""

from __future__ import annotations

import pytest

from ladder.ir.gemm import Gemm
from schedules.schedule import GpuSchedule
from targets import get_device

EARLY = "tirx.use_programtic_dependent_launch"


def emitted(name: str):
    from ladder.lower.build import emit

    gemm = Gemm(n=4096, k=4096, weight="int4", group_size=128, scale=True)
    schedule = GpuSchedule("gemv", 8, stages=4, warps=14, split_k=2, placement="accumulator")
    return emit(gemm, get_device(f"cuda/{name}"), schedule, "kernel")


def test_hopper_asks_for_an_early_launch() -> None:
    function = emitted("sm_90a")
    parameters = [str(name) for name in function.attrs["tirx.kernel_launch_params"]]
    assert EARLY in parameters
    assert parameters[-1] == "tirx.use_dyn_shared_memory"


def test_only_prefetches_come_before_the_wait() -> None:
    lines = emitted("sm_90a").script().splitlines()
    wait = next(i for i, line in enumerate(lines) if "griddepcontrol" in line and "wait" in line)
    before, after = "\n".join(lines[:wait]), "\n".join(lines[wait:])
    assert "launch_dependents" in before
    assert "prefetch" in before
    assert "ptx.ld" not in before
    assert "ptx.ld" in after


def test_loads_cannot_be_moved_before_the_wait() -> None:
    """ptxas moves ld.global.nc up, since it takes what it reads for constant."""
    assert "global_nc" not in emitted("sm_90a").script().replace(".", "_")


@pytest.mark.parametrize("name", ["sm_75", "sm_80"])
def test_older_devices_launch_as_before(name: str) -> None:
    function = emitted(name)
    assert "tirx.kernel_launch_params" not in function.attrs
    assert "griddepcontrol" not in function.script()
