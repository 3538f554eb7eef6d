"""Which proven recipe costs AMD GPUs least, and which need not round.

bfloat16 arithmetic goes through float32 (`ladder.lower.rocm.machine`). `FloatMachine` executes it as
the GPU does, so that recipes are proven for that too; with `CuttingMachine` those that never round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ladder.lower.gpu.machine import REFERENCE_COST, SELECT, Machine, Word
from ladder.lower.gpu.proof import NumpyMachine, Words, lanes, prove
from ladder.lower.gpu.proven import (
    NEEDS,
    Proven,
    count,
    decode_all,
    is_decodable,
    proof_key,
    proven_recipes,
    table_bytes,
)
from ladder.lower.gpu.recipes import PLAIN, Conversion, Recipe
from ladder.lower.rocm.byte_table import propose_byte_table
from ladder.lower.rocm.converted import Converted, propose_converted
from ladder.lower.rocm.machine import Form, bitwise
from schedules.conversions import converted_as
from targets import TileDevice
from tile_types.errors import VerificationError


class FloatMachine(NumpyMachine):
    """Executes bfloat16 instructions in float32, and rounds."""

    def _rounded(self, single: Any) -> Words:
        bits = np.asarray(single, np.float32).view(np.uint32)
        odd = bits >> np.uint32(16) & np.uint32(1)
        return (bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)

    def _wide(self, *words: Words) -> list[Any]:
        """Return the float32 values of both lanes of every operand."""
        whole = np.broadcast_arrays(*words)
        return list(zip(*([x.astype(np.float32) for x in lanes("bfloat16", w)] for w in whole), strict=True))

    def _do_float_sub(self, a: Words, b: Words, core: str) -> Words:
        if core != "bfloat16":
            return super()._do_float_sub(a, b, core)
        return self._join([self._rounded(x - y) for x, y in self._wide(a, b)])

    def _do_float_mul(self, a: Words, b: Words, core: str) -> Words:
        if core != "bfloat16":
            return super()._do_float_mul(a, b, core)
        return self._join([self._rounded(x * y) for x, y in self._wide(a, b)])

    def _do_float_fma(self, a: Words, b: Words, c: Words, core: str) -> Words:
        if core != "bfloat16":
            return super()._do_float_fma(a, b, c, core)
        # Products of bfloat16 are exact in float64, and so are sums of values this near each other.
        wide = ([x.astype(np.float64) for x in operands] for operands in self._wide(a, b, c))
        return self._join([self._rounded((x * y + z).astype(np.float32)) for x, y, z in wide])


class CuttingMachine(FloatMachine):
    """Executes bfloat16 instructions in float32, and cuts the results off."""

    def _rounded(self, single: Any) -> Words:
        return np.asarray(single, np.float32).view(np.uint32) >> np.uint32(16)


@dataclass(frozen=True)
class Exact:
    """A recipe whose float32 results need no rounding."""

    inner: Recipe

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Return a register, as the recipe does."""
        m.exact = True
        try:
            return self.inner.register(m, words, index, zero)
        finally:
            m.exact = False


OPERATIONS = {
    "shift": 1,
    "rotate": 1,
    "multiply": 4,
    "subtract": 1,
    "select_bytes": 1,
    "narrow": 5,
    "halves": 3,
    "convert": 1,
    "look_up": 8,
    "table_lane": 1,
    "reference": REFERENCE_COST,
}
"""Vector instructions of an operation; a 32-bit product takes four times as long as others."""

COMPUTED_PERMUTE = 4
"""The same of a permutation whose selector is computed: nibbles become bytes first."""

BFLOAT_EXACT, BFLOAT_ROUNDED = 5, 10
"""The same of bfloat16 arithmetic: two lanes are widened, calculated, and joined, perhaps rounded."""

ONE_INSTRUCTION = (("|", ("&", "x", "y"), "z"), ("|", "z", ("&", "x", "y")), bitwise(SELECT))
"""Forms of several operations that V_AND_OR and V_BFI perform at once."""


class VectorCounter(Machine):
    """Counts vector instructions; contents are constants, or None where computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def perform(self, operation: str, words: list[Any], immediates: tuple[Any, ...]) -> Any:
        """Count one operation."""
        if operation == "constant":
            return immediates[0]
        if operation == "lop3":
            form = bitwise(immediates[0])
            self.count += 1 if form in ONE_INSTRUCTION else max(1, _operators(form))
        elif operation == "permute":
            self.count += COMPUTED_PERMUTE if words[2] is None else 1
        elif operation.startswith("float_"):
            bfloat = BFLOAT_EXACT if self.exact else BFLOAT_ROUNDED
            self.count += bfloat if immediates[0] == "bfloat16" else 1
        else:
            self.count += OPERATIONS[operation]
        return None


def _operators(form: Form) -> int:
    """Return the operators of a form of `bitwise`; a complement comes with its neighbour."""
    if isinstance(form, str):
        return 0
    return int(form[0] != "~") + sum(_operators(part) for part in form[1:])


def vector_instructions(recipe: Recipe, conversion: Conversion) -> int:
    """Return the vector instructions of decoding a lane's share of a tile (32 codes)."""
    m = VectorCounter()
    decode_all(recipe, conversion, m)
    return m.count


def best_recipe(conversion: Conversion, device: TileDevice) -> Proven:
    """Return the recipe that takes the fewest vector instructions, proven for float32 arithmetic too.

    Raises VerificationError if none passes.
    """
    shared = proven_recipes(conversion) if is_decodable(conversion) else ()
    choices = [
        as_wave
        for proven in (*shared, *_own_recipes(conversion, device))
        if proven.strategy not in NEEDS and not table_bytes(proven.recipe)
        if proven.in_range
        for as_wave in proven_here(proven, conversion)
    ]
    if not choices:
        raise VerificationError(f"no decode of {conversion.ttype.name} is right in float32 arithmetic")
    return min(choices, key=lambda proven: vector_instructions(proven.recipe, conversion))


_own: dict[tuple[Any, ...], list[Proven]] = {}


def _own_recipes(conversion: Conversion, device: TileDevice) -> list[Proven]:
    """Return look-ups by V_PERM and conversions by the device's instructions, proven."""
    codes = converted_as(conversion.ttype, conversion.operand, device)
    key = (*proof_key(conversion), codes)
    if key not in _own:
        proposals = [("byte table", recipe) for recipe in propose_byte_table(conversion)]
        proposals += [("converted", recipe) for recipe in propose_converted(conversion, codes)]
        for _, recipe in proposals:
            prove(recipe, conversion)
        _own[key] = [
            Proven(strategy, recipe, PLAIN, count(recipe, conversion)) for strategy, recipe in proposals
        ]
    return _own[key]


def proven_here(proven: Proven, conversion: Conversion) -> list[Proven]:
    """Return a recipe as AMD GPUs can run it: cutting off, rounding, or not at all."""
    if conversion.operand != "bfloat16" or isinstance(proven.recipe, Converted):
        return [proven]
    for machine, recipe in ((CuttingMachine, Exact(proven.recipe)), (FloatMachine, proven.recipe)):
        try:
            prove(recipe, conversion, proven.meaning, machine)
        except VerificationError:
            continue
        return [replace(proven, recipe=recipe)]
    return []
