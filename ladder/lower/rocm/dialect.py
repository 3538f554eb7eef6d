"""Emission of AMD kernels beside `ladder.lower.builder`: launches, LDS and vector accesses.

TVM's ROCm code generator knows threads as launch extents, shared memory as one static buffer, and
wide accesses as vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.lower import Expr
from ladder.lower import builder as b
from targets import TileDevice


def launch(blocks: Expr, threads: int) -> tuple[Expr, Expr]:
    """Begin the device part: ``blocks`` blocks of ``threads`` threads. Return block and thread."""
    return _launch("blockIdx.x", blocks), _launch("threadIdx.x", threads)


def _launch(axis: str, extent: Expr) -> Expr:
    frame = I.launch_thread(axis, extent)
    # The frame ends with the one around it.
    frame.add_callback(lambda: frame.__exit__(None, None, None))
    return frame.__enter__()


def shared(words: int) -> Any:
    """Allocate the block's LDS: uint32 words. A kernel has one such buffer."""
    return I.alloc_buffer((words,), "uint32", scope="shared")


LDS_DONE = {64: 0xC07F, 32: 0xFC07}
"""Wave width -> operand of S_WAITCNT that waits for LGKMCNT 0 and for no other counter.

Sources: CDNA3 ISA, section 4.4; RDNA3 ISA, section 5.6. Devices of 64 lanes are GFX9, those of 32 are
GFX11, which places the counters differently; GFX12 has a wait for each counter (``wait.ds``).
"""


def await_lds(device: TileDevice) -> None:
    """Emit a wait for this wave's accesses of LDS, which no access crosses in the compiler."""
    if "wait.ds" in device.features:
        effect("llvm.amdgcn.s.wait.dscnt", T.int16(0))
    else:
        effect("llvm.amdgcn.s.waitcnt", T.int32(LDS_DONE[device.warp]))


def block_sync(device: TileDevice) -> None:
    """Emit a barrier of the block that LDS accesses do not cross.

    S_BARRIER alone orders instructions of waves, not their accesses to LDS: each wave awaits its own first.
    """
    await_lds(device)
    b.emit(T.tvm_storage_sync("shared"))


def wave_sync(device: TileDevice) -> None:
    """Emit a barrier of the wave's lanes that LDS accesses do not cross; TVM has no instruction for it."""
    await_lds(device)
    b.emit(T.tvm_storage_sync("warp"))


def schedule_fence() -> None:
    """Keep LLVM from moving instructions over this place: loads stay ahead of the work that hides them."""
    effect("llvm.amdgcn.sched.barrier", T.int32(0))


def finish_here(values: Any, at: int, count: int) -> None:
    """Have what was computed be there at this place.

    LLVM takes RDNA3's WMMA, which reads all lanes' registers, for what it may move into a branch that part
    of the wave takes; a use before the branch, of which nothing is emitted, prevents it.
    """
    effect("llvm.fake.use", values[lanes(at, count)])


def effect(name: str, *operands: Expr) -> None:
    """Emit a call of an LLVM intrinsic for its effect."""
    b.emit(T.call_llvm_intrin("void", name, *operands))


def lanes(first: Expr, width: int) -> Expr:
    """Return the indices of ``width`` neighbours from ``first`` on: one vector access."""
    return first if width == 1 else T.Ramp(first, 1, width)


def vector(parts: list[Expr]) -> Expr:
    """Join scalars to a vector."""
    return parts[0] if len(parts) == 1 else T.Shuffle(parts, list(range(len(parts))))


def as_type(value: Expr, dtype: str) -> Expr:
    """Return the bits of a value as another type of the same size."""
    return T.reinterpret(value, dtype=dtype)


OF_WORDS = "ladder_"
"""How names of the functions in ``bfloat16.ll`` begin: instructions on vectors of bfloat16 as words."""


def is_of_words(name: str) -> bool:
    """Tell whether a name is that of such a function, which takes no immediates, not an intrinsic's."""
    return name.startswith(OF_WORDS)


def intrinsic(dtype: str, name: str, *operands: Expr) -> Expr:
    """Call an LLVM intrinsic whose result depends on nothing but this lane's operands."""
    call = T.call_pure_extern if is_of_words(name) else T.call_llvm_pure_intrin
    return call(dtype, name, *operands)


IN_ORDER = 0x03020100
"""V_PERM's selector of the bytes of its second operand as they are."""


def separate(value: Expr) -> Expr:
    """Return a float16 or float32 product such that LLVM does not join it with a sum to one multiply-add.

    Of a value that is the same in all lanes LLVM compiles no ``llvm.arithmetic.fence``.
    """
    if str(value.ty.dtype) == "float16":
        word = separate_word(T.Cast("uint32", as_type(value, "uint16")))
        return as_type(T.Cast("uint16", word), "float16")
    return as_type(separate_word(as_type(value, "uint32")), str(value.ty.dtype))


def separate_word(word: Expr) -> Expr:
    """Return a word by way of an instruction that LLVM sees nothing through."""
    return intrinsic("uint32", "llvm.amdgcn.perm", word, word, T.uint32(IN_ORDER))


def cross_lane(dtype: str, name: str, *operands: Expr) -> Expr:
    """Emit, here, a call of an LLVM intrinsic that reads registers of other lanes, and return its result.

    TVM moves what is pure to where it is used, which may be a branch that part of the wave takes.
    """
    return b.bind(T.call_llvm_intrin(dtype, name, *operands))


def mfma(dtype: str, name: str, weights: Expr, activations: Expr, sums: Expr) -> Expr:
    """Emit, here, an MFMA without broadcasts and return its sums."""
    if is_of_words(name):
        return b.bind(T.call_extern(dtype, name, weights, activations, sums))
    return cross_lane(dtype, name, weights, activations, sums, *[T.int32(0)] * 3)  # cbsz, abid, blgp


def load(target: Any, source: Any, *index: Expr, width: int, at: int = 0) -> None:
    """Emit one access: ``width`` elements of ``source`` from the last index on go to ``target[at..]``."""
    place = (*index[:-1], lanes(index[-1], width))
    b.store(target, source[place], lanes(at, width))


class Pieces:
    """Words in buffers as wide as the loads that fill them, indexed as one.

    LLVM keeps a buffer in one vector: of words that arrive at different times it would wait for the
    last, and copy, where the loop begins anew.

    widths: Words of each buffer.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.buffers = [b.local(width, "uint32") for width in widths]
        self.places = [
            (buffer, at) for buffer, w in zip(self.buffers, widths, strict=True) for at in range(w)
        ]

    def __getitem__(self, index: int) -> Expr:
        buffer, at = self.places[index]
        return buffer[at]

    def store(self, piece: int, value: Expr, width: int) -> None:
        """Emit a vector becoming the content of one buffer."""
        b.store(self.buffers[piece], value, lanes(0, width))


def shuffle_xor(value: Expr, dtype: str, lane: Expr, distance: int) -> Expr:
    """Return a 32-bit value of the lane at a distance (a power of two) within the wave."""
    moved = cross_lane("int32", "llvm.amdgcn.ds.bpermute", (lane ^ distance) * 4, as_type(value, "int32"))
    return as_type(moved, dtype)


QUAD_PAIRS, QUAD_HALVES, HALF_MIRROR, MIRROR = 0xB1, 0x4E, 0x141, 0x140
"""DPP controls: quad_perm [1, 0, 3, 2] and [2, 3, 0, 1], row_half_mirror, row_mirror (CDNA3 ISA, 6.3)."""

MOVES = {1: QUAD_PAIRS, 2: QUAD_HALVES, 4: HALF_MIRROR, 8: MIRROR}
"""Distance -> a control that brings a value of the other half of twice as many lanes.

The mirrors bring another lane than the one at the distance.
"""


def exchange(value: Expr, dtype: str, lane: Expr, distance: int) -> Expr:
    """Return 32 bits of the other half of ``2 * distance`` lanes, of which each half holds the same."""
    if distance not in MOVES:
        return shuffle_xor(value, dtype, lane, distance)
    every = T.int32(0xF)
    controls = (T.int32(MOVES[distance]), every, every, T.bool(True))
    moved = cross_lane("int32", "llvm.amdgcn.mov.dpp", as_type(value, "int32"), *controls)
    return as_type(moved, dtype)


IN_PLACE = (0x76543210, 0xFEDCBA98)
"""V_PERMLANEX16's selectors of the lanes of the other sixteen in their order."""


def other_half(value: Expr, dtype: str) -> Expr:
    """Return a 32-bit value of the lane at a distance of 16 within a wave of 32."""
    word = as_type(value, "int32")
    order, immediates = map(T.uint32, IN_PLACE), (T.bool(False), T.bool(False))
    return as_type(cross_lane("int32", "llvm.amdgcn.permlanex16", word, word, *order, *immediates), dtype)


def with_other_half(words: Sequence[Expr], first: Expr) -> list[Expr]:
    """Return the registers of an operand that takes those of both halves of a wave of 32.

    words: This lane's registers, bound.
    first: Whether it is of the first half, whose registers come first.
    """
    other = [other_half(word, "uint32") for word in words]
    low = [b.bind(T.Select(first, x, y)) for x, y in zip(words, other, strict=True)]
    return low + [b.bind(T.Select(first, y, x)) for x, y in zip(words, other, strict=True)]


def left_row(row: Expr, operands: int, run: int) -> Expr:
    """Return which row of a left operand a lane holds, such that runs of sums follow it.

    Register i of a lane of RDNA3 of half h is row ``2 * i + h`` of the sums.

    row: The lane's number among sixteen.
    operands: How many halves of a wave hold an operand.
    run: Neighbouring columns of the sums that a lane holds.
    """
    return row if operands == 1 else row % 2 * run + row // 2


CARRIERS = {"float16": "uint16", "bfloat16": "uint16", "int8": "uint8"}
"""Unsigned types of the size of narrow ones; the others are words."""


def to_word(value: Expr, dtype: str) -> Expr:
    """Return the bits of a value as a word.

    A narrow load fills a whole register; LLVM would join two values as soon as they arrive.
    """
    if dtype in CARRIERS:
        return T.Cast("uint32", T.reinterpret(value, dtype=CARRIERS[dtype]))
    return as_type(value, "uint32")
