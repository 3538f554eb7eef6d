"""The grids of GGUF's IQ types: which vectors of levels a stored index means.

The numbers are those of ``ggml-common.h`` of llama.cpp (``iq2xxs_grid`` and so on), as indices of levels.
"""

from __future__ import annotations

import zlib
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt

GRIDS = {
    "iq2_xxs": (256, 8, 2),
    "iq2_xs": (512, 8, 2),
    "iq2_s": (1024, 8, 2),
    "iq3_xxs": (256, 4, 3),
    "iq3_s": (512, 4, 3),
    "iq1_s": (2048, 8, 2),
}
"""Name -> vectors, elements of one, bits of a level; in the order of the file ``gguf_grids.z``.

It has a 16-bit word for each vector, the first level lowest, compressed by zlib.
"""


@cache
def grid(name: str) -> npt.NDArray[np.uint8]:
    """Return the levels of all vectors of a grid, [vectors, elements]."""
    words = np.frombuffer(
        zlib.decompress(files("ladder.formats").joinpath("gguf_grids.z").read_bytes()), "<u2"
    )
    first = 0
    for other, (count, length, bits) in GRIDS.items():
        if other == name:
            shifts = np.arange(0, length * bits, bits, dtype=np.uint16)
            levels = words[first : first + count, None] >> shifts & np.uint16((1 << bits) - 1)
            return levels.astype(np.uint8)
        first += count
    raise KeyError(name)
