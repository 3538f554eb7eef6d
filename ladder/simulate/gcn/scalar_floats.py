"""Scalar float32 and float16 instructions of RDNA4: arithmetic, conversions and comparisons of SGPRs.

Semantics: RDNA4 ISA, SOP2, SOP1, SOPC and VOP3 (V_S_SQRT and others of one scalar).
Subnormal numbers are kept, as kernels are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ladder.simulate.amd.arithmetic import fma, special
from ladder.simulate.gcn.floats import larger, smaller, to_integer
from ladder.simulate.gcn.listing import GcnError, Instruction, Operand
from ladder.simulate.gcn.wave import Wave, literal_bits

Step = Callable[[Wave], Any]
Number = Any
"""A float32, or integer, of numpy."""

ARITHMETIC: dict[str, Callable[..., Number]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "min_num": smaller,
    "max_num": larger,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "fmamk": lambda a, k, b: fma(a, k, b),
    "fmaak": fma,
    "ceil": np.ceil,
    "floor": np.floor,
    "trunc": np.trunc,
    "rndne": np.rint,
}
"""Mnemonic between ``s_`` and the type -> a float of floats."""

FLOATS: dict[str, type] = {"f32": np.float32, "f16": np.float16}

SPECIAL: dict[str, Callable[[Number], Number]] = {
    "exp_f32": special(np.exp2),
    "log_f32": special(np.log2),
    "rcp_f32": special(lambda x: 1.0 / x),
    "rsq_f32": special(lambda x: 1.0 / np.sqrt(x)),
    "sqrt_f32": special(np.sqrt),
}
"""Mnemonic behind ``v_s_``: what the special function unit computes of one number."""


def _half(bits: Number) -> Number:
    """Return 16 bits, which are a float16, as float32."""
    return np.float32(np.uint16(bits).view(np.float16))


CONVERSIONS: dict[str, tuple[type, Callable[[Number], Number]]] = {
    "cvt_f32_i32": (np.int32, np.float32),
    "cvt_f32_u32": (np.uint32, np.float32),
    "cvt_i32_f32": (np.float32, to_integer(np.int32)),
    "cvt_u32_f32": (np.float32, to_integer(np.uint32)),
    "cvt_f32_f16": (np.uint32, lambda word: _half(word & np.uint32(0xFFFF))),
    "cvt_hi_f32_f16": (np.uint32, lambda word: _half(word >> np.uint32(16))),
    "cvt_f16_f32": (np.float32, lambda x: np.uint32(np.float16(x).view(np.uint16))),
}
"""Mnemonic -> type of the source, and what it becomes."""

COMPARISONS: dict[str, Callable[[Number, Number], bool]] = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: a < b or a > b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: not (np.isnan(a) or np.isnan(b)),
}
"""Relations; their negations, ``u`` and those with ``n`` before the name, hold for NaN."""


def _read(operand: Operand, dtype: type) -> Callable[[Wave], Number]:
    """Return what reads a source as a number of a type."""
    if operand.negated or operand.absolute:
        raise GcnError("the emulator does not know scalar floats with a changed sign")
    if operand.kind == "s":
        index = operand.index
        return lambda w: _number(np.uint32(w.scalar(index)), dtype)
    if operand.kind != "literal":
        raise GcnError("a scalar instruction reads a vector register")
    kind = next((name for name, known in FLOATS.items() if known is dtype), "u32")
    value = _number(np.uint32(literal_bits(operand.text, kind)), dtype)
    return lambda w: value


def _number(word: Number, dtype: type) -> Number:
    """Return a register's bits as a number; a float16 is the lower half."""
    return word.astype(np.uint16).view(dtype) if dtype is np.float16 else word.view(dtype)


def _writing(
    i: Instruction, function: Callable[..., Number], sources: list[Callable[[Wave], Number]]
) -> Step:
    to = i.operands[0].index

    def step(w: Wave) -> None:
        with np.errstate(all="ignore"):
            value = np.asarray(function(*(source(w) for source in sources)))
        w.set_scalar(to, int(value.view(f"u{value.dtype.itemsize}")), 1)

    return step


def _compare(i: Instruction, relation: str, dtype: type) -> Step:
    a, b = (_read(operand, dtype) for operand in i.operands)
    opposite = relation not in COMPARISONS
    test = COMPARISONS["o" if relation == "u" else relation[1:] if opposite else relation]

    def step(w: Wave) -> None:
        w.scc = int(bool(test(a(w), b(w))) != opposite)

    return step


def translate(i: Instruction) -> Step | None:
    """Return the closure of a scalar instruction of floats; None if it is none that is known."""
    if i.op.startswith("v_s_"):
        function = SPECIAL.get(i.op.removeprefix("v_s_"))
        return function and _writing(i, function, [_read(i.operands[1], np.float32)])
    name = i.op.removeprefix("s_")
    if name in CONVERSIONS:
        source, convert = CONVERSIONS[name]
        return _writing(i, convert, [_read(i.operands[1], source)])
    stem, _, kind = name.rpartition("_")
    if kind not in FLOATS:
        return None
    dtype = FLOATS[kind]
    if stem.startswith("cmp_"):
        return _compare(i, stem.removeprefix("cmp_"), dtype)
    if stem == "fmac":
        return _writing(i, fma, [_read(operand, dtype) for operand in (*i.operands[1:], i.operands[0])])
    function = ARITHMETIC.get(stem)
    return function and _writing(i, function, [_read(operand, dtype) for operand in i.operands[1:]])
