"""Kernels that only decode: one packed tile in, every operand register out. Used by several tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from ladder.ir.gemm import Gemm
from tile_types import TType, list_types, representable

CORES = ("float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2")


def packable_elements() -> list[TType]:
    """Return every element type of the library that CUDA kernels can stream."""
    elements = {ttype.element_type.name: ttype.element_type for ttype in list_types()}
    return [t for t in elements.values() if t.elem_bits <= 8 or t.elem_bits == 16]


def conversions() -> list[tuple[str, str, str]]:
    """Return every (element type, core, kind of zero point inside the decode) that is lossless."""
    return [
        (t.name, core, zero)
        for t in packable_elements()
        for core in CORES
        for zero in ("none", "integer")
        if representable(t, core, zero) and t.elem_bits <= (8 if core in CORES[2:] else 16)
    ]


def emit_decode(gemm: Gemm, device: Any, name: str) -> Any:
    """Emit ``out[register, thread]`` for one tile of words; scales and zeros come as registers."""
    from ladder.lower import builder as b
    from ladder.lower.cuda.decode import load_order, make_decoder

    decoder = make_decoder(gemm, device)
    parts = 2 if gemm.zero == "float" else 1
    with b.function(name) as result:
        words = b.tensor("words", (128 * decoder.words,), "uint32")
        scales = b.tensor("scales", (2,), "uint32")
        zeros = b.tensor("zeros", (2 * parts,), "uint32")
        out = b.tensor("out", (decoder.lane, 128), "uint32")
        b.device()
        b.block_index([1])
        thread = b.thread_index(128)
        own = b.local(decoder.words, "uint32")
        at = 0
        for offset, width in load_order(decoder.words):
            for v in range(width):
                b.store(own, words[offset + thread * width + v], at)
                at += 1
        registers = b.local(decoder.lane, "uint32")
        scale = (scales[0], scales[1]) if gemm.scale and decoder.lane == 16 else None
        zero: Any = None
        if gemm.zero == "integer":
            zero = (zeros[0], zeros[1])
        elif gemm.zero == "float":
            zero = ((zeros[0], zeros[1]), (zeros[2], zeros[3]))
        decoder.registers(own, 0, decoder.lane, registers, 0, scale, zero)
        for index in range(decoder.lane):
            b.store(out, registers[index], index, thread)
    return result.func


def tile_codes(ttype: TType, seed: int = 0) -> Any:
    """Return a 64 x 64 tile of valid codes that holds each of them (up to 4096)."""
    rng = np.random.default_rng(seed)
    valid = ttype.valid_codes()
    codes = np.resize(rng.permutation(valid), 64 * 64)
    return rng.permutation(codes).reshape(64, 64)


def fragment_place(lane: int, thread: int, register: int, element: int) -> tuple[int, int]:
    """Return (row, k) of an element, from the PTX ISA's figures of the A fragments.

    m16n8k16 (16-bit) and m16n8k32 (8-bit): a0, a1 and a2, a3 of lane ``4g+c`` are rows g and g+8,
    first the lower then the upper half of k.
    """
    warp, g, c = thread // 32, thread % 32 // 4, thread % 4
    step, kh, h = register // 4, register // 2 % 2, register % 2
    per = 32 // lane
    return 16 * warp + g + 8 * h, step * 8 * per + kh * 4 * per + c * per + element
