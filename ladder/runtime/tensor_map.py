"""Tensor maps in im2col mode, which TVM's runtime cannot encode: the driver does, by ctypes."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from schedules.im2col import IM2COL
from tile_types.errors import DeviceError

DRIVER = "libcuda.so.1"
MAP_BYTES = 128
DATA_TYPES = {"float16": 6, "bfloat16": 9, "uint8": 0}
"""CUtensorMapDataType."""

SWIZZLE_128, PROMOTE_128, FILL_ZEROS, NO_INTERLEAVE = 3, 2, 0, 0


def encode(target: Any, data: Any, dtype: str, *numbers: int) -> None:
    """Write the map of an image to the host memory at ``target``; see `schedules.im2col.IM2COL`."""
    ctypes.memmove(_address(target), encoded(_address(data), str(dtype), *map(int, numbers)), MAP_BYTES)


def _address(pointer: Any) -> int:
    return pointer.value or 0 if isinstance(pointer, ctypes.c_void_p) else int(pointer)


@lru_cache(maxsize=1024)
def encoded(
    data: int,
    dtype: str,
    batch: int,
    height: int,
    width: int,
    channels: int,
    box: int,
    pixels: int,
    *window: int,
) -> bytes:
    """Return the 128 bytes of a map; the arguments are those of `IM2COL`.

    Raises DeviceError if the driver refuses it, e.g. since windows reach further than 128 pixels.
    """
    kernel, strides, padding, dilation = zip(window[::2], window[1::2], strict=True)
    element = 1 if dtype == "uint8" else 2
    # The driver counts axes from the innermost one: channels, columns, rows, images.
    low = [-padding[axis] for axis in (1, 0)]
    high = [padding[axis] - (kernel[axis] - 1) * dilation[axis] for axis in (1, 0)]
    pitches = [element * channels, element * channels * width, element * channels * width * height]
    # The map must lie at a multiple of 64 bytes.
    room = ctypes.create_string_buffer(MAP_BYTES + 64)
    place = -(-ctypes.addressof(room) // 64) * 64
    function = ctypes.CDLL(DRIVER).cuTensorMapEncodeIm2col
    status = function(
        ctypes.c_void_p(place),
        ctypes.c_int(DATA_TYPES[dtype]),
        ctypes.c_uint32(4),
        ctypes.c_void_p(data),
        (ctypes.c_uint64 * 4)(channels, width, height, batch),
        (ctypes.c_uint64 * 3)(*pitches),
        (ctypes.c_int * 2)(*low),
        (ctypes.c_int * 2)(*high),
        ctypes.c_uint32(box),
        ctypes.c_uint32(pixels),
        (ctypes.c_uint32 * 4)(1, strides[1], strides[0], 1),
        ctypes.c_int(NO_INTERLEAVE),
        ctypes.c_int(SWIZZLE_128),
        ctypes.c_int(PROMOTE_128),
        ctypes.c_int(FILL_ZEROS),
    )
    if status:
        raise DeviceError(
            f"the driver refuses (error {status}) windows {window} of {dtype} images"
            f" {[batch, height, width, channels]}; use a schedule of pipeline 'mma'"
        )
    return ctypes.string_at(place, MAP_BYTES)


def register() -> None:
    """Let kernels find `encode`."""
    import tvm_ffi

    tvm_ffi.register_global_func(IM2COL, encode, override=True)
