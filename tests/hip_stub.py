"""A HIP runtime that checks every argument and executes kernels on the emulator of machine code.

A small C library has the functions with the prototypes of HIP's reference and hands their arguments on; the
rest is Python. GPU memory is memory of this process, known by address and size.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ladder.lower.rocm.code_object import _metadata, require_loadable
from ladder.lower.rocm.toolchain import compile_functions
from ladder.runtime import hip
from ladder.runtime.library import load_library
from ladder.simulate.gcn.launch import run
from ladder.simulate.launch import SimulationResult
from targets import get_device

SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
typedef int hipError_t;
typedef uint64_t u;
static hipError_t (*hook)(const char *, const u *);
void stub_hook(hipError_t (*f)(const char *, const u *)) { hook = f; }
#define GO(name, ...) { u v[] = {__VA_ARGS__}; return hook(name, v); }
hipError_t hipInit(unsigned flags) GO("hipInit", flags)
hipError_t hipGetDeviceCount(int *count) GO("hipGetDeviceCount", (u)count)
hipError_t hipSetDevice(int device) GO("hipSetDevice", device)
hipError_t hipDeviceGetName(char *name, int len, int device) GO("hipDeviceGetName", (u)name, len, device)
hipError_t hipRuntimeGetVersion(int *version) GO("hipRuntimeGetVersion", (u)version)
hipError_t hipModuleLoadData(void **module, const void *image) GO("hipModuleLoadData", (u)module, (u)image)
hipError_t hipModuleGetFunction(void **f, void *module, const char *name)
    GO("hipModuleGetFunction", (u)f, (u)module, (u)name)
hipError_t hipModuleLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
    unsigned bz, unsigned shared, void *stream, void **params, void **extra)
    GO("hipModuleLaunchKernel", (u)f, gx, gy, gz, bx, by, bz, shared, (u)stream, (u)params, (u)extra)
hipError_t hipMalloc(void **address, size_t size) GO("hipMalloc", (u)address, size)
hipError_t hipFree(void *address) GO("hipFree", (u)address)
hipError_t hipMemcpy(void *to, const void *from, size_t size, int kind)
    GO("hipMemcpy", (u)to, (u)from, size, kind)
hipError_t hipDeviceSynchronize(void) GO("hipDeviceSynchronize", 0)
hipError_t hipEventCreate(void **event) GO("hipEventCreate", (u)event)
hipError_t hipEventRecord(void *event, void *stream) GO("hipEventRecord", (u)event, (u)stream)
hipError_t hipEventElapsedTime(float *ms, void *a, void *b) GO("hipEventElapsedTime", (u)ms, (u)a, (u)b)
hipError_t hipEventDestroy(void *event) GO("hipEventDestroy", (u)event)
const char *hipGetErrorString(hipError_t code) { return code == 1 ? "invalid argument" : "unknown error"; }
"""

INVALID = 1
"""hipErrorInvalidValue."""

GUARD = 64
"""Bytes on both sides of an allocation that nobody may write."""

PATTERN = 0xA5


class Refused(Exception):
    """An argument that HIP would refuse, or that would make the GPU fault."""


def require(condition: bool, what: str) -> None:
    """Refuse what does not hold."""
    if not condition:
        raise Refused(what)


class Stub:
    """The runtime's state.

    Parameters
    ----------
    arch
        Architecture of its one GPU.
    folder
        Where the library is built.
    """

    def __init__(self, arch: str, folder: Path) -> None:
        self.arch, self.assemblies = arch, list[str]()
        self.memory: dict[int, Any] = {}
        self.modules: dict[int, bytes] = {}
        self.functions: dict[int, dict[str, Any]] = {}
        self.launches: list[tuple[str, int, int]] = []
        self.events: list[int] = []
        self.refusals: list[str] = []
        self.findings: list[str] = []
        self.counts = Counter[str]()
        self._next = 0x1000
        source, self.library = folder / "hip.c", folder / "libamdhip64.so"
        source.write_text(SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", self.library, source], check=True)
        self._hook = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64))(
            self._call
        )
        ctypes.CDLL(str(self.library)).stub_hook(self._hook)

    def _call(self, name: bytes, words: Any) -> int:
        function = getattr(self, name.decode())
        try:
            function(*words[: function.__code__.co_argcount - 1])
        except Refused as error:
            self.refusals.append(f"{name.decode()}: {error}")
            return INVALID
        except Exception as error:  # ctypes would only print it
            self.refusals.append(f"{name.decode()}: {type(error).__name__}: {error}")
            return 999
        return 0

    def _handle(self, out: int) -> int:
        self._next += 16
        ctypes.c_uint64.from_address(out).value = self._next
        return self._next

    # ---- devices ----
    def hipInit(self, flags: int) -> None:
        require(flags == 0, "flags are not 0")

    def hipGetDeviceCount(self, out: int) -> None:
        ctypes.c_int.from_address(out).value = 1

    def hipSetDevice(self, device: int) -> None:
        require(device == 0, f"no device {device}")

    def hipDeviceGetName(self, out: int, size: int, device: int) -> None:
        require(device == 0 and size > len(self.arch), "no room for the name")
        ctypes.memmove(out, self.arch.encode() + b"\0", len(self.arch) + 1)

    def hipRuntimeGetVersion(self, out: int) -> None:
        ctypes.c_int.from_address(out).value = 70_000_000

    def hipDeviceSynchronize(self) -> None:
        pass

    def hipEventCreate(self, out: int) -> None:
        self.events.append(self._handle(out))

    def hipEventRecord(self, event: int, stream: int) -> None:
        require(event in self.events, "no event")

    def hipEventElapsedTime(self, out: int, first: int, last: int) -> None:
        require(first in self.events and last in self.events, "no event")
        ctypes.c_float.from_address(out).value = 0.25

    def hipEventDestroy(self, event: int) -> None:
        require(event in self.events, "no event")
        self.events.remove(event)

    # ---- memory ----
    def hipMalloc(self, out: int, size: int) -> None:
        require(size > 0, "no bytes")
        held = np.full(size + 2 * GUARD + 256, PATTERN, np.uint8)
        address = -(-(held.ctypes.data + GUARD) // 256) * 256
        self.memory[address] = held, size
        ctypes.c_uint64.from_address(out).value = address

    def hipFree(self, address: int) -> None:
        require(address in self.memory, "no allocation begins here")
        held, size = self.memory.pop(address)
        start = address - held.ctypes.data
        outside = np.concatenate([held[:start], held[start + size :]])
        require(bool((outside == PATTERN).all()), "bytes beside the allocation were written")

    def hipMemcpy(self, to: int, source: int, size: int, kind: int) -> None:
        require(kind in (1, 2), f"kind {kind}")
        gpu = to if kind == 1 else source
        require(
            any(a <= gpu and gpu + size <= a + n for a, (_, n) in self.memory.items()), "not in GPU memory"
        )
        ctypes.memmove(to, source, size)

    # ---- kernels ----
    def hipModuleLoadData(self, out: int, image: int) -> None:
        header = ctypes.string_at(image, 64)
        sections = int.from_bytes(header[0x28:0x30], "little")
        size, count = (int.from_bytes(header[at : at + 2], "little") for at in (0x3A, 0x3C))
        binary = ctypes.string_at(image, sections + size * count)
        require_loadable(binary, self.arch, 5)
        self.modules[self._handle(out)] = binary

    def hipModuleGetFunction(self, out: int, module: int, name: int) -> None:
        symbol = ctypes.string_at(name).decode()
        require(module in self.modules, "no module")
        kernels = next(note["amdhsa.kernels"] for note in _metadata(self.modules[module]))
        found = [kernel for kernel in kernels if kernel[".name"] == symbol]
        require(len(found) == 1, f"no kernel {symbol}")
        self.functions[self._handle(out)] = found[0]

    def hipModuleLaunchKernel(
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int,
        shared: int, stream: int, params: int, extra: int,
    ) -> None:  # fmt: skip
        require(function in self.functions, "no kernel")
        require(min(gx, gy, gz, bx, by, bz) > 0 and bx * by * bz <= 1024, "no such grid")
        require(max(gy, gz, by, bz) == 1, "kernels of Ladder have one axis")
        require(extra == 0 and shared == 0 and stream == 0, "extra, dynamic LDS or a stream that is not 0")
        kernel = self.functions[function]
        symbol, most = kernel[".name"], kernel[".max_flat_workgroup_size"]
        require(bx <= most, f"{bx} threads, compiled for {most}")
        visible = [each for each in kernel[".args"] if not each[".value_kind"].startswith("hidden")]
        given = [self._argument(params, index, each) for index, each in enumerate(visible)]
        assembly = next((text for text in self.assemblies if f"\n{symbol}:" in text), "")
        report = run(assembly, symbol, self.arch, given, gx, bx)
        self.findings += [str(each) for each in report.findings]
        self.counts += report.counts
        self.launches.append((symbol, gx, bx))

    def _argument(self, params: int, index: int, form: dict[str, Any]) -> Any:
        """Return what the kernel would read of an argument: memory, or a number."""
        place = ctypes.c_uint64.from_address(params + 8 * index).value
        if form[".value_kind"] == "by_value":
            return int.from_bytes(ctypes.string_at(place, form[".size"]), "little", signed=True)
        require(form[".value_kind"] == "global_buffer", form[".value_kind"])
        address = ctypes.c_uint64.from_address(place).value
        require(address in self.memory, f"argument {index} is no address of an allocation")
        held, count = self.memory[address]
        start = address - held.ctypes.data
        return held[start : start + count]


_kept: list[Stub] = []


@contextmanager
def installed(arch: str, folder: Path) -> Iterator[Stub]:
    """Put a stub into the runtime's place; the process keeps it, as what tvm_ffi has registered names it."""
    stub = Stub(arch, folder)
    _kept.append(stub)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hip, "LIBRARIES", (str(stub.library),))
        hip.runtime.cache_clear()
        yield stub
    hip.runtime.cache_clear()


def launched(
    stub: Stub, function: Any, arrays: Sequence[np.ndarray | int], outputs: Sequence[int]
) -> SimulationResult:
    """Run a kernel as users' GPUs do, by its compiled host part; what it writes is put into the arrays."""
    name, library = str(function.attrs["global_symbol"]), stub.library.with_name("kernel.so")
    compiled = compile_functions({name: function}, get_device(f"rocm/{stub.arch}"), library)
    stub.assemblies.append(compiled.source)
    entry = load_library(library.read_bytes(), library.name, "rocm")[name]
    tensors = [array for array in arrays if not isinstance(array, int)]
    with hip.on_device(hip.runtime(), tensors) as (held, given):
        rest = iter(given)
        entry(*(array if isinstance(array, int) else next(rest) for array in arrays))
        for array, copy in zip(tensors, held, strict=True):
            array[...] = copy.fetch()
    return SimulationResult(tuple(arrays[at] for at in outputs), (), {}, (), counts=stub.counts)  # type: ignore[misc]
