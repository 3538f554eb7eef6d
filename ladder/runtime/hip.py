"""AMD kernels launched through the HIP runtime, which TVM's wheel cannot do.

The host part of a kernel library asks tvm_ffi for a module of kind ``hip``: a code object, its kernels and
what they take. `load_code_object` makes one of C functions, each of which hands the arguments that the host
part computed to ``hipModuleLaunchKernel``. No AMD GPU has run this; tests put a stub in the runtime's place.

Sources: HIP runtime API reference (module and memory management); TVM's ``metadata.h`` (function info).
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tile_types.errors import ArtifactError, DeviceError, MissingToolError

LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
"""Names of the HIP runtime; that of a ROCm build of torch is found once torch is imported."""

ROCM = 10
"""DLPack's device type of AMD GPUs."""

TO_DEVICE, TO_HOST = 1, 2
"""hipMemcpyKind."""

FLOAT = 2
"""DLPack's type code of floats."""

AXES = ("blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z")
DYNAMIC = "tirx.use_dyn_shared_memory"
"""What the values behind a kernel's arguments mean."""

Pointer = ctypes.c_void_p
Words = ctypes.c_uint
ByReference = ctypes.POINTER(ctypes.c_void_p)
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "hipInit": (Words,),
    "hipGetDeviceCount": (ctypes.POINTER(ctypes.c_int),),
    "hipSetDevice": (ctypes.c_int,),
    "hipDeviceGetName": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "hipRuntimeGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "hipModuleLoadData": (ByReference, ctypes.c_char_p),
    "hipModuleGetFunction": (ByReference, Pointer, ctypes.c_char_p),
    "hipModuleLaunchKernel": (Pointer, *(Words,) * 7, Pointer, ByReference, ByReference),
    "hipMalloc": (ByReference, ctypes.c_size_t),
    "hipFree": (Pointer,),
    "hipMemcpy": (Pointer, Pointer, ctypes.c_size_t, ctypes.c_int),
    "hipDeviceSynchronize": (),
    "hipEventCreate": (ByReference,),
    "hipEventRecord": (Pointer, Pointer),
    "hipEventElapsedTime": (ctypes.POINTER(ctypes.c_float), Pointer, Pointer),
    "hipEventDestroy": (Pointer,),
}
"""Function -> types of its arguments; each returns a hipError_t."""


class Any64(ctypes.Structure):
    """``TVMFFIAny``: a tagged value."""

    _fields_ = (("kind", ctypes.c_int32), ("padding", ctypes.c_uint32), ("bits", ctypes.c_uint64))


Entry = ctypes.CFUNCTYPE(ctypes.c_int, Pointer, ctypes.POINTER(Any64), ctypes.c_int32, ctypes.POINTER(Any64))
"""``TVMFFISafeCallType``."""


class Hip:
    """The HIP runtime's functions, each checked.

    Raises MissingToolError if the library is not there or lacks one of them.
    Raises DeviceError if it shows no GPU.
    """

    def __init__(self) -> None:
        self.library = _library()
        for name, types in SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = types, ctypes.c_int
        self.library.hipGetErrorString.argtypes = (ctypes.c_int,)
        self.library.hipGetErrorString.restype = ctypes.c_char_p
        self.call("hipInit", 0)
        count = ctypes.c_int(0)
        self.call("hipGetDeviceCount", ctypes.byref(count))
        if not count.value:
            raise DeviceError("the HIP runtime shows no GPU")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of `SIGNATURES`; raises DeviceError with the runtime's own words."""
        code = getattr(self.library, name)(*arguments)
        if code:
            words = self.library.hipGetErrorString(code)
            raise DeviceError(f"{name} failed: {words.decode() if words else code} ({code})")

    def made(self, name: str, *arguments: Any) -> Pointer:
        """Call a function whose first argument takes a handle or an address, and return that."""
        handle = Pointer()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def version(self) -> int:
        """Return the runtime's version: major * 10000000 + minor * 100000 + patch."""
        found = ctypes.c_int(0)
        self.call("hipRuntimeGetVersion", ctypes.byref(found))
        return found.value

    def device_name(self) -> str:
        """Return what the runtime calls GPU 0."""
        text = ctypes.create_string_buffer(256)
        self.call("hipDeviceGetName", text, 256, 0)
        return text.value.decode()

    def milliseconds(self, work: Callable[[], None]) -> float:
        """Return the GPU's time from before to behind ``work``, on the default stream."""
        first, last = self.made("hipEventCreate"), self.made("hipEventCreate")
        self.call("hipEventRecord", first, None)
        work()
        self.call("hipEventRecord", last, None)
        self.call("hipDeviceSynchronize")
        found = ctypes.c_float(0)
        self.call("hipEventElapsedTime", ctypes.byref(found), first, last)
        for event in (first, last):
            self.call("hipEventDestroy", event)
        return found.value


def _library() -> ctypes.CDLL:
    """Open the HIP runtime."""
    why = "no name given"
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            why = str(error)
            continue
        lacking = [each for each in SIGNATURES if not hasattr(library, each)]
        if not lacking:
            return library
        why = f"{name} lacks {', '.join(lacking)}"
    raise MissingToolError(f"running AMD kernels needs ROCm's HIP runtime, {LIBRARIES[0]}: {why}")


@cache
def runtime() -> Hip:
    """Return the HIP runtime, opened once; raises as `Hip` does."""
    return Hip()


# ---- code objects ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """A kernel as its library describes it.

    symbol: Its name in the code object.
    types: DLPack code and bits of each argument.
    extents: What the values behind the arguments mean: `AXES` or `DYNAMIC`.
    """

    symbol: str
    types: tuple[tuple[int, int], ...]
    extents: tuple[str, ...]


class Blob:
    """Reads what TVM wrote of a ROCm module: lengths and numbers of 8 bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self.data):
            raise ArtifactError("a kernel library's AMD module ends early; build it again")
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def text(self) -> str:
        return self.take(self.number()).decode()

    def function(self) -> Function:
        """Return what is said of a kernel: its arguments, an unused word for each, and its extents."""
        self.text()
        symbol = self.text()
        words = [struct.unpack("<BBH", self.take(4)) for _ in range(self.number())]
        extents = tuple(self.text() for _ in range(self.number()))
        for _ in range(self.number()):
            self.take(4)
        return Function(symbol, tuple((code, bits) for code, bits, _ in words), extents)


def parse_module(data: bytes) -> tuple[list[Function], bytes]:
    """Return the kernels and the code object of a module that TVM wrote.

    Raises ArtifactError if it is none.
    """
    blob = Blob(data)
    if blob.text() != "hsaco":
        raise ArtifactError("a kernel library's AMD module is no code object; build it again")
    functions = [blob.function() for _ in range(blob.number())]
    return functions, blob.take(blob.number())


_prefixes = itertools.count()
_kept: list[Any] = []
"""What C holds addresses of: entries, code objects."""


def load_code_object(data: Any) -> Any:
    """Return a tvm_ffi module whose functions launch the kernels of a code object."""
    import tvm_ffi

    functions, binary = parse_module(bytes(data))
    hip, prefix = runtime(), f"ladder_hip_{next(_prefixes)}_"
    module = hip.made("hipModuleLoadData", binary)
    interface = _interface()
    for function in functions:
        handle = hip.made("hipModuleGetFunction", module, function.symbol.encode())
        entry = Entry(_launcher(hip, handle, function))
        name = f"__tvm_ffi_{prefix}{function.symbol}".encode()
        if interface.TVMFFIEnvModRegisterSystemLibSymbol(name, ctypes.cast(entry, Pointer)):
            raise ArtifactError(f"tvm_ffi takes no entry for {function.symbol}")
        _kept.append(entry)
    _kept.append(binary)
    return tvm_ffi.system_lib(prefix)


def _launcher(hip: Hip, handle: Pointer, function: Function) -> Callable[..., int]:
    """Return what the host part calls: a launch on the stream of the caller, whose errors it raises."""

    def launch(_: Any, values: Any, count: int, result: Any) -> int:
        try:
            _launch(hip, handle, function, values[:count])
        except Exception as error:  # C takes none
            words = type(error).__name__.encode(), str(error).encode()
            _interface().TVMFFIErrorSetRaisedFromCStr(*words)
            return -1
        result[0] = Any64()
        return 0

    return launch


def _launch(hip: Hip, handle: Pointer, function: Function, values: Sequence[Any64]) -> None:
    """Launch with arguments, and extents behind them."""
    count = len(function.types)
    if len(values) != count + len(function.extents):
        raise DeviceError(f"{function.symbol} takes {count} arguments, got {len(values)} with extents")
    extents = {name: value.bits for name, value in zip(function.extents, values[count:], strict=True)}
    sizes = [extents.get(axis, 1) for axis in AXES]
    pairs = zip(values[:count], function.types, strict=True)
    slots = (ctypes.c_uint64 * count)(*(_slot(value.bits, *each) for value, each in pairs))
    start = ctypes.addressof(slots)
    places = (Pointer * count)(*(start + 8 * index for index in range(count)))
    stream = _interface().TVMFFIEnvGetStream(ROCM, 0)
    hip.call("hipModuleLaunchKernel", handle, *sizes, extents.get(DYNAMIC, 0), stream, places, None)


def _slot(bits: int, code: int, width: int) -> int:
    """Return an argument as the kernel reads it: floats come as doubles, numbers as 64 bits."""
    if code == FLOAT and width == 32:
        (value,) = struct.unpack("<d", struct.pack("<Q", bits))
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return bits & ((1 << width) - 1)


@cache
def _interface() -> ctypes.CDLL:
    """Return tvm_ffi's C interface."""
    import tvm_ffi

    library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    library.TVMFFIEnvModRegisterSystemLibSymbol.argtypes = (ctypes.c_char_p, Pointer)
    library.TVMFFIErrorSetRaisedFromCStr.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    library.TVMFFIEnvGetStream.argtypes = (ctypes.c_int32, ctypes.c_int32)
    library.TVMFFIEnvGetStream.restype = Pointer
    return library


@cache
def register() -> None:
    """Let tvm_ffi load AMD kernels; raises as `Hip` does."""
    import tvm_ffi

    hip = runtime()
    tvm_ffi.register_error("DeviceError", DeviceError)
    tvm_ffi.register_global_func("ffi.Module.load_from_bytes.hip", load_code_object)
    before = tvm_ffi.get_global_func("__tvm_set_device", allow_missing=True)

    def set_device(kind: int, number: int) -> None:
        if kind == ROCM:
            hip.call("hipSetDevice", number)
        elif before is not None:
            before(kind, number)

    tvm_ffi.register_global_func("__tvm_set_device", set_device, override=True)


# ---- memory ------------------------------------------------------------------------------------------


class _Managed(ctypes.Structure):
    """``DLManagedTensor``."""

    _fields_ = (
        ("data", Pointer), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64),
        ("context", Pointer), ("deleter", Pointer),
    )  # fmt: skip


TYPE_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}
"""Beginning of a numpy dtype's name -> DLPack type code; the longest that fits counts."""


class Array:
    """A contiguous array in the memory of GPU 0, filled from the host.

    hip: The runtime.
    values: A C-contiguous numpy array; narrow floats are those of ml_dtypes.
    """

    def __init__(self, hip: Hip, values: np.ndarray[Any, Any]) -> None:
        self.hip, self.values = hip, np.ascontiguousarray(values)
        self.address = hip.made("hipMalloc", max(1, self.values.nbytes))
        self._copy(self.address, self.values.ctypes.data, TO_DEVICE)
        name = str(values.dtype)
        code = TYPE_CODES[max((each for each in TYPE_CODES if name.startswith(each)), key=len)]
        self._shape = (ctypes.c_int64 * values.ndim)(*values.shape)
        strides = [step // values.itemsize for step in self.values.strides]
        self._strides = (ctypes.c_int64 * values.ndim)(*strides)
        self._managed = _Managed(
            self.address.value, ROCM, 0, values.ndim, code, values.itemsize * 8, 1,
            self._shape, self._strides, 0, None, None,
        )  # fmt: skip

    def _copy(self, to: Any, source: Any, kind: int) -> None:
        if self.values.nbytes:
            self.hip.call("hipMemcpy", to, source, self.values.nbytes, kind)

    def __dlpack_device__(self) -> tuple[int, int]:
        return ROCM, 0

    def __dlpack__(self, **_: Any) -> Any:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (Pointer, ctypes.c_char_p, Pointer)
        return make(ctypes.addressof(self._managed), b"dltensor", None)

    def fetch(self) -> np.ndarray[Any, Any]:
        """Copy the array back into ``values``, which is returned; waits for the GPU."""
        self.hip.call("hipDeviceSynchronize")
        self._copy(self.values.ctypes.data, self.address, TO_HOST)
        return self.values

    def free(self) -> None:
        """Give the memory back."""
        self.hip.call("hipFree", self.address)


@contextmanager
def on_device(hip: Hip, values: Sequence[np.ndarray[Any, Any]]) -> Iterator[tuple[list[Array], list[Any]]]:
    """Yield copies of arrays in GPU memory, and what kernels take for them; frees them at the end."""
    import tvm_ffi

    arrays = [Array(hip, each) for each in values]
    try:
        yield arrays, [tvm_ffi.from_dlpack(each) for each in arrays]
    finally:
        for array in arrays:
            array.free()
