"""All-reduce over peers' memory, for small tensors on GPUs that reach each other's: one kernel, no barrier.

Plans use it where all ranks of a group find that their GPUs reach each other's memory, unless
``LADDER_PEER_MEMORY=0``; NCCL adds up what is larger, of another type, or across machines.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import platform
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ladder import knobs
from ladder.lower.cuda.peer_source import BLOCKS, DTYPES, LARGEST, THREADS, all_reduce_source, buffer_bytes
from ladder.runtime.compile import target_of
from ladder.runtime.tensor_map import DRIVER
from targets import get_device
from tile_types.errors import DeviceError

log = logging.getLogger("ladder.model")

PATIENCE = 600 * 10**9
"""Nanoseconds that a kernel waits for its peers before it ends with an error, as NCCL's watchdog does."""

TYPES = {getattr(torch, name): name for name in DTYPES}

_groups: dict[tuple[str, torch.device], Peers | None] = {}
"""Group and this rank's GPU -> its peers; None if they were found not to reach each other."""


class Peers:
    """Memory that the GPUs of a group share, and the kernels that add up through it.

    where: This rank's GPU.
    rank: Of this process.
    addresses: Of every rank's memory as this GPU reaches it, `buffer_bytes` of zeros each, in the order of
        ranks.
    held: What must live as long.
    """

    def __init__(self, where: torch.device, rank: int, addresses: Sequence[int], held: Any) -> None:
        self.where, self.rank, self.ranks, self.held = where, rank, len(addresses), held
        self.addresses = (ctypes.c_uint64 * self.ranks)(*addresses[rank:], *addresses[:rank])
        self.epochs = torch.zeros(BLOCKS, dtype=torch.int32, device=where)
        self.stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def takes(self, x: torch.Tensor, operation: str) -> bool:
        """Tell whether the kernel adds up such a tensor."""
        return operation == "sum" and x.dtype in TYPES and x.nbytes <= LARGEST and x.is_contiguous()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, summed in float32 in their order: the same bits on all."""
        y = torch.empty_like(x)
        if x.nbytes == 0:
            return y
        item = x.element_size()
        launch(
            self.where,
            kernel(TYPES[x.dtype], self.ranks, self.where),
            -(-x.nbytes // (8 * THREADS)),
            THREADS,
            (
                ctypes.c_uint64(x.data_ptr()),
                ctypes.c_uint64(y.data_ptr()),
                ctypes.c_uint32(x.nbytes // item),
                ctypes.c_uint32(self.rank),
                self.addresses,
                ctypes.c_uint64(self.epochs.data_ptr()),
                ctypes.c_uint64(self.stop.data_ptr()),
                ctypes.c_uint64(PATIENCE),
            ),
        )
        return y


def connected(group: str, where: torch.device) -> Peers:
    """Return the peers of a group, in torch's symmetric memory; all its ranks call this together.

    Raises RuntimeError if such memory cannot be had.
    """
    symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
    buffer = symmetric.empty(buffer_bytes(_group(group).size()), dtype=torch.uint8, device=where)
    buffer.zero_()
    torch.cuda.synchronize(where)  # zeros are there before a peer may write
    handle = symmetric.rendezvous(buffer, group)
    return Peers(where, handle.rank, handle.buffer_ptrs, (buffer, handle))


@functools.cache
def kernel(dtype: str, ranks: int, where: torch.device) -> ctypes.c_void_p:
    """Return the driver's handle of the kernel, compiled and loaded on a GPU."""
    from ladder.lower.cuda.toolchain import compile_cuda

    code, _ = compile_cuda(all_reduce_source(dtype, ranks), get_device(target_of(where)), "cubin")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(where):
        torch.cuda.current_stream()  # the GPU's context is there
        _checked("cuModuleLoadData", ctypes.byref(module), code)
        _checked("cuModuleGetFunction", ctypes.byref(function), module, b"all_reduce")
    return function


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute; its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint64 * 8))


class _Configuration(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    )


EARLY_LAUNCH = _Attribute(6, (ctypes.c_uint64 * 8)(1))
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: a kernel may start while the one before it ends."""


@functools.cache
def _launches_early(where: torch.device) -> bool:
    return "pdl" in get_device(target_of(where)).features


def launch(
    where: torch.device, function: ctypes.c_void_p, blocks: int, threads: int, arguments: tuple[Any, ...]
) -> None:
    """Launch a kernel on a GPU's current stream, with arguments as ctypes has them."""
    stream = torch.cuda.current_stream(where).cuda_stream
    sizes = (ctypes.c_uint32 * 3)(blocks, 1, 1), (ctypes.c_uint32 * 3)(threads, 1, 1)
    configuration = _Configuration(*sizes, 0, stream, ctypes.pointer(EARLY_LAUNCH), _launches_early(where))
    places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
    with torch.cuda.device(where):
        _checked("cuLaunchKernelEx", ctypes.byref(configuration), function, places, None)


def _checked(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise DeviceError(f"the driver's {name} fails with error {status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(DRIVER)


def peers_of(group: str, where: torch.device) -> Peers | None:
    """Return what adds up over peers' memory; None, on all ranks alike, where it cannot be had.

    The first call for a group is one that all its ranks must make.
    """
    key = group, where
    if key not in _groups:
        _groups[key] = _agreed(group, where)
    return _groups[key]


def _agreed(group: str, where: torch.device) -> Peers | None:
    """Make a group's peers if all ranks can, told from each other by the reference's all-reduce."""
    if torch.cuda.is_current_stream_capturing():
        raise DeviceError("the first all-reduce of a group cannot be recorded in a CUDA graph: run it before")
    found, why = None, "a rank is on another machine, or its GPU does not reach the others'"
    if _alike(group, where, _machine()) and _all(group, where, _reaches_others(where)):
        try:
            found = connected(group, where)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
        if not _all(group, where, found is not None):
            found = None
    if found is None:
        log.info("group %s adds up by its own library, not over peers' memory: %s", group, why)
    return found


def _reaches_others(where: torch.device) -> bool:
    others = (index for index in range(torch.cuda.device_count()) if index != where.index)
    return torch.version.hip is None and all(
        torch.cuda.can_device_access_peer(where, other) for other in others
    )


def _machine() -> int:
    """Return a number of this process's machine and of the space of its process numbers.

    Processes exchange handles of memory by numbers, so they must see each other's.
    """
    try:
        names = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        names = platform.node()
    return zlib.crc32(names.encode())


def _all(group: str, where: torch.device, mine: bool) -> bool:
    return bool(_least(group, where, int(mine))[0])


def _alike(group: str, where: torch.device, mine: int) -> bool:
    least = _least(group, where, mine, -mine)
    return least[0] == -least[1]


def _least(group: str, where: torch.device, *mine: int) -> list[int]:
    """Return the least of each number over all ranks."""
    agreed = torch.tensor(mine, dtype=torch.int64, device=where)
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=_group(group))
    found: list[int] = agreed.tolist()
    return found


def _group(name: str) -> Any:
    home: Any = torch.distributed.distributed_c10d
    return home._resolve_process_group(name)


def stop_waiting() -> None:
    """Let kernels that wait for peers end, with wrong sums: a peer has failed."""
    for peers in _groups.values():
        if peers is not None:
            peers.stop.fill_(1)


def forget() -> None:
    """Give back the memory that groups shared, before they are destroyed; no kernel may be running."""
    _groups.clear()


def all_reduce(x: torch.Tensor, operation: str, group: str) -> torch.Tensor:
    """Return a reduction over all ranks of a group, over peers' memory where that is possible."""
    if x.is_cuda and knobs.settings.peer_memory:
        peers = peers_of(group, x.device)
        if peers is not None and peers.takes(x, operation):
            return peers.all_reduce(x)
    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.all_reduce(x, operation, group))  # type: ignore[no-any-return]
