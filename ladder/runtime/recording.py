"""CUDA graphs whose recording may fail, so that nothing of it stays behind in torch."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


_one_at_a_time = RLock()
"""Held while something is recorded: recordings of a device share a stream."""


@contextmanager
def recorded(
    graph: torch.cuda.CUDAGraph, where: torch.device | None = None, **options: Any
) -> Iterator[None]:
    """Record the launches of a block into a graph; ``options`` as of ``torch.cuda.graph``.

    where: The device, by default the current one. Torch has one stream for all recordings, on the device that
        was current in the first of them; what others launch would not be recorded.
    Raises RuntimeError if something in it cannot be recorded.
    """
    import torch

    with _one_at_a_time, torch.cuda.device(where):
        pool = torch.cuda.graph_pool_handle()
        options.setdefault("stream", _stream_of(torch.cuda.current_device()))
        try:
            with torch.cuda.graph(graph, pool, **options):
                yield
        except RuntimeError:
            _end(pool, options["stream"])
            raise


RELAXED = 2
"""CUDA's mode in which a thread may do what recordings of any thread forbid by default."""


@contextmanager
def loads_into_gpu() -> Iterator[None]:
    """Let this thread load kernels into a GPU, as their first launch does, while a graph is recorded."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        change = driver.cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no GPU is in use here
        yield
        return
    mode = ctypes.c_int(RELAXED)
    change(ctypes.byref(mode))
    try:
        yield
    finally:
        change(ctypes.byref(mode))


@cache
def _stream_of(device: int) -> torch.cuda.Stream:
    """Return the stream for the recordings of a device."""
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _end(pool: Any, stream: torch.cuda.Stream) -> None:
    """End a recording that failed, which torch leaves open.

    Until then random numbers are those of the recording, so that all that draws some raises, and no memory
    comes back that several streams have used. Generators leave it with another recording that ends well.
    """
    import torch

    with suppress(RuntimeError):  # it may have been ended
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is recorded
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            pass
