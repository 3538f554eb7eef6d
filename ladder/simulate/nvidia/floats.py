"""Float32 instructions that helpers of the emitters name: the special function unit's, and those of two."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ladder.simulate.cohort import Cohort
from ladder.simulate.program import Read
from ladder.simulate.translate import CallView, Translator
from ladder.simulate.values import NUMPY, Array, spread


def special(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Read:
    """Apply an instruction of the special function unit to a float32."""
    read, function = t.read(call.operands[0]), SPECIAL[groups[0]]

    def value(c: Cohort) -> Array:
        with np.errstate(all="ignore"):
            return function(np.asarray(read(c), np.float32))

    return value


def _flushed(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return a function as ``ftz`` makes it: subnormal operands and results are 0."""

    def flush(x: Array) -> Array:
        kept: Array = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)
        return kept

    return lambda x: flush(function(flush(x)))


SPECIAL: dict[str, Callable[[Array], Array]] = {
    "reciprocal": _flushed(lambda x: np.float32(1) / x),
    "whole_reciprocal": lambda x: np.float32(1) / x,
    "power_of_two": _flushed(np.exp2),
    "whole_power_of_two": np.exp2,
    "logarithm_of_two": np.log2,
}
"""Helper -> what its instruction approximates."""


def pair(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Read:
    """Apply an instruction of two float32."""
    reads, function = [t.read(operand) for operand in call.operands], PAIRS[groups[0]]

    def value(c: Cohort) -> Array:
        with np.errstate(all="ignore"):
            return function(*(np.asarray(read(c), np.float32) for read in reads))

    return value


def by_inverse(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Read:
    """Correct a product by a reciprocal by what is left of the dividend: two operations that round once."""
    reads = [t.read(operand) for operand in call.operands]

    def value(c: Cohort) -> Array:
        with np.errstate(all="ignore"):
            x, divisor, inverse = (np.asarray(read(c), np.float32).astype(np.float64) for read in reads)
            near = (x * inverse).astype(np.float32).astype(np.float64)
            rest = (x - near * divisor).astype(np.float32)
            found = (rest * inverse + near).astype(np.float32)
            return np.where(np.isnan(found), near.astype(np.float32), found)

    return value


def largest(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Read:
    """Return the largest of a warp's numbers; of two zeros the positive one."""
    read, kind = t.read(call.operands[0]), NUMPY[groups[0]]

    def value(c: Cohort) -> Array:
        c.require_whole("redux.sync", call.statement)
        values = spread(read(c), c.count, kind)
        order = values.view(np.int32)
        if groups[0] == "float32":  # `ladder.lower.cuda.functions.LARGEST` gives one NaN, above all numbers
            order = np.where(np.isnan(values), 0x7FFFFFFF, order ^ (order >> 31 & 0x7FFFFFFF))
        at = order.argmax(axis=1)[:, None]
        return np.broadcast_to(np.take_along_axis(values, at, axis=1), values.shape)

    return value


PAIRS: dict[str, Callable[[Array, Array], Array]] = {
    "quotient": np.divide,
    "product": np.multiply,
    "log_of_sum": np.logaddexp,
    "maximum": np.maximum,
    "minimum": np.minimum,
}
"""Helper -> what its instruction computes; numpy's extremes keep NaN."""
