"""The skeleton of CPU kernels: the loops of a tile program, with vectors or tile registers inside."""

from __future__ import annotations

from collections.abc import Mapping

from ladder.ir.program import TileProgram, verify_program
from ladder.lower.cpu import vectors as v
from ladder.lower.skeletons.loopnest.amx import TileNest
from ladder.lower.skeletons.loopnest.decode import helpers_of
from ladder.lower.skeletons.loopnest.dots import ByteDigitNest, BytePairNest, DigitNest, PairNest, VectorNest
from ladder.lower.skeletons.loopnest.nest import declare_arguments, kernel_of
from schedules.instructions import BYTE_PAIRS, BYTE_SPLITS, DIGITS, INSTRUCTIONS

PAIRS = "avx2_maddubs"
"""The instruction whose sums have 16 bits at first."""

NESTS: Mapping[str, type[VectorNest]] = {
    PAIRS: PairNest,
    **{name: DigitNest for name, row in INSTRUCTIONS.items() if row.split == DIGITS},
    **{name: ByteDigitNest for name, row in INSTRUCTIONS.items() if row.split in BYTE_SPLITS},
    **{name: BytePairNest for name, row in INSTRUCTIONS.items() if row.recipe == BYTE_PAIRS},
}
"""Instruction -> its nest, where it is not that of all on vector or on tile registers."""

__all__ = ["emit"]


def emit(program: TileProgram) -> None:
    """Emit the body of a kernel.

    Raises VerificationError if the program is not complete.
    """
    verify_program(program)
    product = program.product[0].by
    nest = NESTS.get(product, TileNest if INSTRUCTIONS[product].tiles else VectorNest)
    args = declare_arguments(program)
    called = v.PAIR_HELPERS if product == PAIRS else v.LLVM_HELPERS
    with v.helpers(called + helpers_of(program)):
        nest(kernel_of(program, args)).emit()
