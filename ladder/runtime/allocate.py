"""Allocate and view tensors as torch's compiled code does: without arguments' parsing and dispatch.

About half of the time of ``torch.empty``, and most of that of a view, goes into parsing and dispatch. The
code that torch's own compiler generates calls what is below them; so do plans, where it is there.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Allocate = Callable[[tuple[int, ...], tuple[int, ...], "torch.dtype"], "torch.Tensor"]
"""``(sizes, strides, dtype)`` -> an uninitialised tensor."""


HUGE_PAGE_BYTES = 1 << 22
"""Bytes of an array from which on it lies in huge pages, where the system has them: to give a new array its
memory in small pages takes longer than to fill it."""

View = Callable[["torch.Tensor", tuple[int, ...], tuple[int, ...], int], "torch.Tensor"]
"""``(tensor, sizes, strides, begin)`` -> a view from an element of the tensor on, for steps of plans."""


@cache
def viewer() -> View:
    """Return what views a tensor with other sizes and strides."""
    import torch

    return getattr(torch._C._dynamo.guards, "_reinterpret_tensor", _through_as_strided)


def _through_as_strided(
    tensor: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], begin: int
) -> torch.Tensor:
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + begin)


@cache
def allocator(where: torch.device) -> Allocate:
    """Return what allocates tensors on a device."""
    import torch

    direct = getattr(torch._C._dynamo.guards, f"_empty_strided_{where.type}", None)
    if direct is None:
        return partial(_through_dispatcher, where)
    if where.type != "cuda" or torch.cuda.device_count() == 1:
        return direct  # type: ignore[no-any-return]
    return partial(_on_current_device, direct, where, torch.cuda.current_device)


def _on_current_device(
    direct: Any,
    where: torch.device,
    current: Callable[[], int],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Allocate directly if the tensor's GPU is the current one: the direct way knows no other."""
    if current() == where.index:
        return direct(sizes, strides, dtype)  # type: ignore[no-any-return]
    return _through_dispatcher(where, sizes, strides, dtype)


def _through_dispatcher(
    where: torch.device, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    import torch

    return torch.empty_strided(sizes, strides, dtype=dtype, device=where)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an array of a CPU's memory that was not written; a large one goes back to the system when freed.

    The C library keeps what it allocated from its heap: while a model is loaded, holes between its layers.
    """
    import torch

    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # advice: nothing is lost where the system has no such pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
