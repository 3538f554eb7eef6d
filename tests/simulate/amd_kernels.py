"""Small AMD kernels written by hand, to try single instructions and what the simulator finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.lower import builder as b
from ladder.simulate import SimulationResult, simulate_launch

WAVE = 64


def launch(tag: str, extent: Any) -> Any:
    """Open an axis of the grid or of a block."""
    frame = I.launch_thread(tag, extent)
    frame.add_callback(lambda: frame.__exit__(None, None, None))
    return frame.__enter__()


def intrinsic(dtype: str, name: str, *operands: Any) -> Any:
    """Call an LLVM intrinsic of AMD's by the end of its name."""
    typed = [T.bool(x) if isinstance(x, bool) else T.int32(x) if isinstance(x, int) else x for x in operands]
    typed = [T.int32(x - 2**32) if isinstance(x, int) and x >= 2**31 else x for x in typed]
    return T.call_llvm_pure_intrin(dtype, f"llvm.amdgcn.{name}", *typed)


def compute(arch: str, value: Callable[[Any], Any], dtype: str = "int32") -> np.ndarray:
    """Return what every lane of one wave computes from its number."""
    with b.function("k") as result:
        y = b.tensor("y", (WAVE,), dtype)
        launch("blockIdx.x", 1)
        lane = launch("threadIdx.x", WAVE)
        b.store(y, value(lane), lane)
    out = np.zeros(WAVE, dtype)
    found = simulate_launch(result.func, [out], target=arch)
    assert not found.findings, found.report()
    return out


def run(
    arch: str, body: Callable[[Any, Any, Any], None], threads: int, size: int, **options: Any
) -> SimulationResult:
    """Simulate a block of ``threads`` whose body gets a thread's number, shared words and the output."""
    with b.function("k") as result:
        y = b.tensor("y", (threads,), "uint32")
        launch("blockIdx.x", 1)
        thread = launch("threadIdx.x", threads)
        shared = I.alloc_buffer((size,), "uint32", scope="shared")
        body(thread, shared, y)
    return simulate_launch(result.func, [np.zeros(threads, np.uint32)], target=arch, **options)
