"""Write ``files/q2_0.gguf`` by llama.cpp's own library: the package gguf 0.19 lacks its type.

GGML_LIBRARY=.../libggml-base.so python -m tests.formats.make_q2_0
"""

from __future__ import annotations

import ctypes
import os
import struct

import numpy as np
import torch

from tests.formats.make_files import HERE, digest, record, weight


def main() -> None:
    library = ctypes.CDLL(os.environ["GGML_LIBRARY"], mode=os.RTLD_LAZY)  # libggml-base
    to_float = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    number, (n, k), size = 42, (4, 512), 18
    values, octets = np.zeros((n, k), np.float32), np.zeros((n, k // 64 * size), np.uint8)
    given = weight(number, n, k).numpy()
    given[2, 64:128] = 0
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (given, octets, values)]
    counts = map(ctypes.c_int64, (0, n, k))
    library.ggml_quantize_chunk(number, *pointers[:2], *counts, None)
    octets[3].reshape(-1, size)[:, 2:] = np.random.default_rng(number).integers(0, 256, (k // 64, size - 2))
    library.ggml_get_type_traits.restype = ctypes.POINTER(ctypes.c_void_p * 6)
    traits = library.ggml_get_type_traits(number).contents  # name, two extents, size, whether quantized, ...
    to_float(traits[5])(*pointers[1:], n * k)
    name = b"q2_0"
    start = b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, len(name)) + name
    start += struct.pack("<IQQIQ", 2, k, n, number, 0)
    (HERE / "q2_0.gguf").write_bytes(start + bytes(-len(start) % 32) + octets.tobytes())
    record("q2_0.gguf", {"q2_0": digest(torch.from_numpy(values))}, {})


if __name__ == "__main__":
    main()
