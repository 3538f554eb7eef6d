"""V_CVT_SCALEF32_PK_F16_FP4 and its kind (gfx950): two narrow floats to two halves, times a power of two.

Semantics: AMD Instinct CDNA4 ISA, "VOP3 Instructions": of the float32 scale only the exponent counts, whose
largest value makes NaN of everything, as that of E8M0 does. The result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from ladder.simulate.amd.arithmetic import as_word
from ladder.simulate.amd.scaled import E2M1, NAN_SCALE, SCALE_BIAS
from ladder.simulate.cohort import Cohort
from ladder.simulate.program import Read
from ladder.simulate.translate import CallView, Translator
from ladder.simulate.values import NUMPY, Array, Value

U = np.uint32

SOURCES: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "fp4": (4, lambda codes: E2M1[codes]),
    "fp8": (8, lambda codes: codes.astype(np.uint8).view(NUMPY["float8_e4m3fn"]).astype(np.float64)),
    "bf8": (8, lambda codes: codes.astype(np.uint8).view(NUMPY["float8_e5m2"]).astype(np.float64)),
}
"""Name of a narrow float -> bits, and the values of codes."""

RESULTS = {"f16": "float16", "bf16": "bfloat16"}


def convert(word: Array, scale: Array, place: int, source: str, result: str) -> Array:
    """Return the words of two halves.

    word, scale: Registers: the codes, and the float32 whose exponent counts.
    place: Pair of codes within the word, from its bottom.
    source, result: Names of `SOURCES` and `RESULTS`.
    """
    bits, values = SOURCES[source]
    exponent = (scale >> U(23) & U(0xFF)).astype(np.int64)
    power = np.where(exponent == NAN_SCALE, np.nan, np.exp2(exponent - float(SCALE_BIAS)))
    halves = []
    for element in (0, 1):
        codes = word >> U(bits * (2 * place + element)) & U((1 << bits) - 1)
        with np.errstate(all="ignore"):
            value = np.asarray(values(codes) * power).astype(NUMPY[RESULTS[result]])
        halves.append(value.view(np.uint16).astype(U))
    found: Array = halves[0] | halves[1] << U(16)
    return found


def _translate(source: str, result: str) -> Callable[[Translator, CallView], Read]:
    def translate(t: Translator, call: CallView) -> Read:
        word, scale = (t.read(operand) for operand in call.operands[:2])
        place, kind = t.number(call.operands[2]), NUMPY[RESULTS[result]]
        if call.dtype.startswith("int16"):  # TVM has no vectors of bfloat16
            kind = np.dtype(np.int16)

        def read(c: Cohort) -> Value:
            words, scales = np.broadcast_arrays(as_word(word(c)), as_word(scale(c)))
            found = convert(words, scales, int(place), source, result)
            return np.ascontiguousarray(found)[..., None].view(kind)

        return read

    return translate


READS: dict[str, Callable[[Translator, CallView], Any]] = {
    f"llvm.amdgcn.cvt.scalef32.pk.{result}.{source}": _translate(source, result)
    for source, result in product(SOURCES, RESULTS)
}
"""The intrinsics of the conversions that are emitted."""
