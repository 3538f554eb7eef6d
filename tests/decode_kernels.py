"""Kernels that only decode: one packed tile in, every operand register out. Used by several tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ladder.ir.gemm import Gemm
from schedules.layouts import lane_of
from tile_types import TType, get_type, list_types, representable
from tile_types.held import held

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


SCALES = (0.375 * 2.0**-9, 1.25 * 2.0**-9)
"""Scales of rows g and g+8: below 2**-8, as packing leaves them."""
ZEROS = (1.0, 0.0)
REMAINDERS = (0.25, -0.125)


def problems(core: str) -> list[Gemm]:
    """Return a decode problem for every type that ``core`` holds, with every kind of zero point."""
    scale = lane_of(core) == 16
    found = [Gemm(64, 64, t, core, zero=z, scale=scale) for t, c, z in conversions() if c == core]
    names = sorted({gemm.weight for gemm in found}) if scale else []
    return found + [Gemm(64, 64, t, core, zero="float") for t in names if representable(t, core, "float")]


PLACEMENTS = ("operand", "accumulator", "folded")
"""Kinds of decoders: of both placements, with wide tables; of folded scales, with narrow tables."""


def decoder_for(gemm: Gemm, device: Any, placement: str) -> Any:
    """Return a problem's decoder for a kernel that can do everything it may need."""
    from ladder.lower.gpu.decode import make_decoder

    if placement == "folded":
        return make_decoder(gemm, device, gains=True, table=1 << 15)
    return make_decoder(gemm, device, placement, table=1 << 16)


def is_scaled(gemm: Gemm, placement: str) -> bool:
    """Tell whether decoders multiply by scales."""
    return gemm.scale and lane_of(gemm.activation) == 16 and placement != "accumulator"


def emit_decode(gemms: Gemm | Sequence[Gemm], device: Any, name: str, placement: str = "operand") -> Any:
    """Emit a kernel that decodes one tile per problem, all of one core, one after another.

    Arguments: the tiles' words; per problem four registers of scales and zero points (see
    `operands`); ``out[problem, register, thread]``.
    """
    from ladder.lower import builder as b
    from ladder.lower.gpu.decode import GroupValues
    from ladder.lower.gpu.emission import SharedTable

    cases = [gemms] if isinstance(gemms, Gemm) else list(gemms)
    decoders = [decoder_for(gemm, device, placement) for gemm in cases]
    total = sum(128 * decoder.words for decoder in decoders)
    with b.function(name) as result:
        words = b.tensor("words", (total,), "uint32")
        scales = b.tensor("scales", (len(cases), 2), "uint32")
        zeros = b.tensor("zeros", (len(cases), 4), "uint32")
        out = b.tensor("out", (len(cases), decoders[0].lane, 128), "uint32")
        b.device()
        b.block_index([1])
        thread = b.thread_index(128)
        pool = b.SharedPool()
        room = pool.alloc((max(1, *(decoder.table_words for decoder in decoders)),), "uint32", align=128)
        pool.commit()
        shared = SharedTable.of(room, b.bind(thread % 32))
        start = 0
        for index, (gemm, decoder) in enumerate(zip(cases, decoders, strict=True)):
            scale = (scales[index, 0], scales[index, 1]) if is_scaled(gemm, placement) else None
            low, high = zeros[index, 0], zeros[index, 2]
            pairs = {
                "none": None,
                "integer": (low, high),
                "float": ((low, zeros[index, 1]), (high, zeros[index, 3])),
            }
            own = _load(words, start, decoder.words, thread)
            registers = b.local(decoder.lane, "uint32")
            if decoder.table_words:
                b.block_sync()
                decoder.fill_table(room, thread, 128)
                b.block_sync()
            values = GroupValues(scale, pairs[decoder.zero])
            decoder.registers(own, range(decoder.lane), registers, 0, values, shared)
            for register in range(decoder.lane):
                b.store(out, registers[register], index, register, thread)
            start += 128 * decoder.words
    return result.func


def _load(words: Any, start: int, count: int, thread: Any) -> Any:
    from ladder.lower import builder as b
    from ladder.lower.gpu.decode import load_order

    own = b.local(count, "uint32")
    at = 0
    for offset, width in load_order(count):
        for v in range(width):
            b.store(own, words[start + offset + thread * width + v], at)
            at += 1
    return own


def repeated(core: str, values: Sequence[float]) -> Any:
    """Return numbers as registers that repeat them in every lane: uint32[len(values)]."""
    if lane_of(core) == 8:
        return np.array(values).astype(np.int8).view(np.uint8).astype(np.uint32) * np.uint32(0x01010101)
    dtype = np.float16 if core == "float16" else ml_dtypes.bfloat16
    return np.array(values).astype(dtype).view(np.uint16).astype(np.uint32) * np.uint32(0x00010001)


def operands(gemm: Gemm) -> tuple[Any, Any]:
    """Return two registers of scales and four of zero points (each row's, then its remainder)."""
    low, high = ZEROS
    if gemm.zero == "integer":
        low, high = (max(z, get_type(gemm.weight).minimum) for z in ZEROS)
    scales = repeated(gemm.activation, SCALES) if gemm.scale else np.zeros(2, np.uint32)
    return scales, repeated(gemm.activation, (low, REMAINDERS[0], high, REMAINDERS[1]))


def tile_words(gemm: Gemm) -> Any:
    """Return a packed tile of the problem's weight type."""
    import torch

    from ladder.lower.gpu.proven import packed_layout

    ttype = get_type(gemm.weight)
    codes = torch.from_numpy(tile_codes(ttype).astype(np.int32))
    kept = held(ttype.element_type)
    layout = packed_layout(kept.ttype, gemm.activation)
    return layout.pack(kept.renumbered(codes)).view(torch.int32).numpy().view(np.uint32)


def expected_registers(gemm: Gemm, decoder: Any, placement: str) -> Any:
    """Return ``[register, thread]`` words by the machine that proofs run on."""
    from ladder.lower.gpu.decode import load_order
    from ladder.lower.gpu.proof import NumpyMachine

    m = NumpyMachine()
    flat, threads = tile_words(gemm), np.arange(128)
    words = [m.input(flat[o + threads * w + v]) for o, w in load_order(decoder.words) for v in range(w)]
    scales, zeros = ([m.input(np.array([bits])) for bits in row] for row in operands(gemm))
    rows = []
    for register in range(decoder.lane):
        h = register % 2
        count = {"none": 0, "integer": 1, "float": 2}[decoder.zero]
        zero = tuple(zeros[2 * h : 2 * h + count]) or None
        factors = decoder.prepare(m, scales[h], h) if is_scaled(gemm, placement) else None
        value = decoder.value(m, words, register, factors, zero)
        rows.append(np.broadcast_to(value.content, (128,)))
    return np.stack(rows)


def differing(gemms: Sequence[Gemm], device: Any, out: Any, placement: str = "operand") -> list[str]:
    """Return the problems whose registers in ``out`` are not, bit for bit, as expected."""

    wrong = []
    for gemm, registers in zip(gemms, out, strict=True):
        decoder = decoder_for(gemm, device, placement)
        if not np.array_equal(registers, expected_registers(gemm, decoder, placement)):
            wrong.append(f"{gemm.weight} zero={gemm.zero} by {decoder.choice.strategy}")
    return wrong


def arguments(gemms: Sequence[Gemm], device: Any) -> tuple[Any, Any, Any, Any]:
    """Return the numpy arguments of `emit_decode`'s kernel."""
    from ladder.lower.gpu.decode import make_decoder

    lane = make_decoder(gemms[0], device).lane
    words = np.concatenate([tile_words(gemm) for gemm in gemms])
    scales, zeros = (np.stack(rows) for rows in zip(*map(operands, gemms), strict=True))
    return words, scales, zeros, np.zeros((len(gemms), lane, 128), np.uint32)


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
