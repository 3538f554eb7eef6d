"""NVIDIA's runtime compilation library, which CUDA builds of torch bring: the way without nvcc."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

from ladder.lower.cuda.toolkit import INCLUDE_FOLDERS, LIBRARY_FOLDERS, homes
from tile_types.errors import CompilerError

LIBRARY = "libnvrtc.so.13"
FLAGS = ("-std=c++17", "--device-as-default-execution-space", "-diag-suppress=174,177,550")

TENSOR_MAP = "struct alignas(64) CUtensorMap { unsigned long long opaque[16]; };\n"
"""Declarations of the driver's header, which NVRTC does not read; source that starts so names it."""

HEADERS: Mapping[str, str] = {
    "cuda/std/cstdint": """#pragma once
namespace cuda { namespace std {
typedef signed char int8_t; typedef unsigned char uint8_t;
typedef short int16_t; typedef unsigned short uint16_t;
typedef int int32_t; typedef unsigned int uint32_t;
typedef long long int64_t; typedef unsigned long long uint64_t;
} }
""",
    "cuda/std/type_traits": """#pragma once
namespace cuda { namespace std {
template <bool B> struct bool_constant { static constexpr bool value = B; };
template <class A, class B> struct is_same : bool_constant<false> {};
template <class A> struct is_same<A, A> : bool_constant<true> {};
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <class T, class... Of> struct is_any : bool_constant<(is_same_v<T, Of> || ...)> {};
template <class T> struct is_floating_point : is_any<T, float, double> {};
template <class T> struct is_signed : is_any<T, signed char, short, int, long, long long, float, double> {};
template <class T> struct is_unsigned
    : is_any<T, bool, unsigned char, unsigned short, unsigned, unsigned long, unsigned long long> {};
template <class T> struct is_integral
    : bool_constant<(is_signed<T>::value || is_unsigned<T>::value) && !is_floating_point<T>::value> {};
template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool, class A, class> struct conditional { typedef A type; };
template <class A, class B> struct conditional<false, A, B> { typedef B type; };
} }
""",
}
"""The part of NVIDIA's C++ library that TVM's sources include, and torch does not bring."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load NVRTC: that of the packages, of a toolkit, or where the system looks; None without one."""
    folders = [home / folder for home in homes() for folder in LIBRARY_FOLDERS]
    for path in (*(folder / LIBRARY for folder in folders), Path(LIBRARY)):
        for builtins in path.parent.glob("libnvrtc-builtins.so.13.*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)  # NVRTC opens it by name only
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None


def version() -> str:
    """Return the release of the library, as in ``13.0``."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _loaded().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_source(source: str, architecture: str, output: str) -> tuple[bytes, str]:
    """Compile CUDA source.

    source: CUDA C++ as TVM emits it.
    architecture: As in ``sm_90a``.
    output: ``"cubin"`` or ``"ptx"``.
    Returns: Machine code or PTX, and what NVRTC and ptxas printed.
    Raises CompilerError with NVRTC's messages, if it rejects the source.
    """
    nvrtc, program = _loaded(), ctypes.c_void_p()
    headers = _strings(HEADERS.values()), _strings(HEADERS)
    code = (TENSOR_MAP + source).encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, b"kernel.cu", len(HEADERS), *headers)
    try:
        options = [*FLAGS, f"--gpu-architecture={architecture}", "--ptxas-options=-v", *_include_options()]
        failed = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
        log = _text(program, "ProgramLog").rstrip(b"\0").decode()
        if failed:
            raise CompilerError(log)
        return _text(program, output.upper()), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _loaded() -> ctypes.CDLL:
    nvrtc = library()
    assert nvrtc is not None, "callers ask library() first"
    return nvrtc


def _strings(values: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [value.encode() for value in values]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    """Return what ``nvrtcGet<what>`` gives, of the length that ``nvrtcGet<what>Size`` says."""
    nvrtc, size = _loaded(), ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _include_options() -> list[str]:
    """Return the options that name folders with ``cuda_fp16.h``."""
    folders = (home / folder for home in homes() for folder in INCLUDE_FOLDERS)
    return [f"--include-path={folder}" for folder in folders if (folder / "cuda_fp16.h").is_file()]
