"""An AMD GPU in place of this machine's CPU: what torch programs compile to for it runs in the emulator.

Operands are torch's CPU tensors, and what has no kernel runs in torch; each kernel is compiled to machine
code, of which `ladder.simulate` executes every instruction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import torch

from ladder import knobs
from ladder.lower import build as lowering
from ladder.runtime import compile as compiling
from ladder.runtime.build import Job, all_built
from ladder.runtime.model import build
from ladder.simulate import simulate_launch

NARROW = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.int8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.int8, ml_dtypes.float8_e5m2),
}
"""Types that numpy lacks -> an integer of their width, and what stands for them."""


@dataclass(frozen=True)
class Kernel:
    """A kernel before it is compiled: its function's name, and the function."""

    entry: str
    function: Any
    spilled: int = 0


@dataclass
class EmulatedGpu:
    """Stands in for the build and the launch of kernels.

    target: ``rocm/`` and an architecture.
    launches: Of kernels so far.
    """

    target: str
    launches: int = 0
    _known: dict[str, Kernel] = field(default_factory=dict)

    def attempt(self, jobs: Sequence[Job]) -> list[Kernel | Exception]:
        """Emit what jobs would build; `ladder.runtime.build.attempt` for machine code that is emulated."""
        return [self._emitted(job) for job in jobs]

    def _emitted(self, job: Job) -> Kernel | Exception:
        def emit(function: Callable[[str], Any], name: str, device: Any, folder: Any) -> Any:
            return Kernel(name, function(name))

        def emit_product(gemm: Any, device: Any, plan: Any, folder: Any) -> Any:
            ((_, schedule),) = plan.entries
            name = lowering.entry_name(gemm, device.name, schedule)
            return Kernel(name, lowering.emit(gemm, device, schedule, name))

        if job.key not in self._known:
            try:
                with patch.multiple(lowering, build_function=emit, build=emit_product):
                    self._known[job.key] = job.make(None)  # type: ignore[arg-type, assignment]
            except Exception as error:
                return error
        return self._known[job.key]

    def find_or_build(self, jobs: Sequence[Job]) -> list[Kernel]:
        """Emit what jobs would build, as `ladder.runtime.build.find_or_build`."""
        return all_built(self.attempt(jobs))  # type: ignore[arg-type, return-value]

    def load_entry(self, kernel: Kernel, family: str) -> Callable[..., None]:
        """Return what launches a kernel; raises AssertionError for what the emulator finds."""

        def launch(*given: Any) -> None:
            arguments = [value if isinstance(value, int) else _array(value) for value in given]
            written = [at for at, value in enumerate(arguments) if not isinstance(value, int)]
            result = simulate_launch(
                kernel.function, arguments, target=self.target, outputs=written, stage="code"
            )
            self.launches += 1
            assert not result.findings, result.report()

        return launch


def _array(tensor: Any) -> np.ndarray:
    """Return the memory of a contiguous tensor."""
    found = torch.utils.dlpack.from_dlpack(tensor)
    assert found.is_contiguous(), f"kernels get dense tensors, got strides {found.stride()}"
    bits, dtype = NARROW.get(found.dtype, (found.dtype, None))
    array: np.ndarray = found.view(bits).numpy()
    return array if dtype is None else array.view(dtype)


@contextmanager
def on_amd(target: str) -> Iterator[EmulatedGpu]:
    """Have programs on CPU tensors compiled for an AMD GPU, and their kernels emulated."""
    gpu, real = EmulatedGpu(target), compiling.target_of
    stands = {"load_entry": gpu.load_entry, "family_of": lambda device: "cpu"}
    products = {"find_or_build": gpu.find_or_build, "RUNNABLE": {"rocm"}, "_compiled": {}}
    with ExitStack() as stack:
        stack.enter_context(knobs.override(cache=False, strict=True))
        stack.enter_context(patch.dict(vars(build), {"attempt": gpu.attempt, **stands}))
        stack.enter_context(patch.dict(vars(compiling), {**products, **stands}))
        for module in [each for each in sys.modules.values() if vars(each).get("target_of") is real]:
            stack.enter_context(patch.object(module, "target_of", lambda where: target))
        yield gpu
