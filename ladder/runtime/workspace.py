"""Device memory that kernels keep from launch to launch: one per stream, and one per graph.

Kernels that add up parts of a tile (`ladder.lower.cuda.wgmma_stream`) pass them from block to block
through a workspace. Its flags must be zero before the first launch; every launch leaves them so.
Launches that share a workspace must follow each other, so each stream has its own. A graph may be
replayed beside the stream that it was captured on: each capture gets a workspace from the graph's own
memory, whose flags the graph itself zeroes when a replay begins.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

from schedules.shares import FLAG_BYTES, WORKSPACE
from tile_types.errors import MissingToolError

if TYPE_CHECKING:
    import torch

_held: dict[tuple[int, int, bool], tuple[int, torch.Tensor]] = {}
"""(device, stream, whether it captures) -> number of the capture, or 0, and the memory."""


def workspace(size: int) -> int:
    """Return the address of at least ``size`` bytes for a launch on the current device and stream."""
    import torch

    device = torch.cuda.current_device()
    stream = torch._C._cuda_getCurrentRawStream(device)
    capturing = torch.cuda.is_current_stream_capturing()
    capture = _capture_number(stream) if capturing else 0
    number, memory = _held.get((device, stream, capturing), (0, None))
    if memory is None or number != capture or memory.nbytes < size:
        memory = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
        memory[:FLAG_BYTES].zero_()
        # What it replaces is free for later work on the same stream alone, which follows its last use.
        _held[device, stream, capturing] = capture, memory
    return memory.data_ptr()


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _capture_number(stream: int) -> int:
    """Return the number, unique in the process, of the capture that a stream is part of."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    found = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if found:
        raise MissingToolError(f"the CUDA driver does not tell which graph is captured (error {found})")
    return number.value


def register() -> None:
    """Let kernels find `workspace`."""
    import tvm_ffi

    tvm_ffi.register_global_func(WORKSPACE, workspace, override=True)
