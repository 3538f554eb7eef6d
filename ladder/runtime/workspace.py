"""Device memory for one launch: what kernels pass from block to block through global memory.

Kernels that add up parts of a tile (`ladder.lower.cuda.wgmma_stream`) need no particular contents, so
any free memory will do. It comes from torch's allocator, which hands it on in the order of the
stream, or from the memory of the graph that is being captured.
"""

from __future__ import annotations

import threading

from ladder.runtime.allocate import allocator
from schedules.shares import WORKSPACE

_kept = threading.local()


def workspace(size: int) -> int:
    """Return the address of ``size`` bytes for the launch that this thread is about to make.

    They are kept until the thread asks again: by then the launch is in its stream, and memory that
    is free serves later work of that stream alone.
    """
    import torch

    where = torch.device("cuda", torch.cuda.current_device())
    _kept.memory = allocator(where)((size,), (1,), torch.uint8)
    return int(_kept.memory.data_ptr())


def register() -> None:
    """Let kernels find `workspace`."""
    import tvm_ffi

    tvm_ffi.register_global_func(WORKSPACE, workspace, override=True)
