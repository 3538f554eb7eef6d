"""Scalar float32 instructions of RDNA4: arithmetic, conversions and comparisons of SGPRs.

Semantics: RDNA4 ISA, SOP2, SOP1, SOPC and VOP3 (V_S_SQRT and others of one scalar).
Subnormal numbers are kept, as kernels are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ladder.simulate.gcn.floats import fma, larger, smaller, special, to_integer
from ladder.simulate.gcn.listing import GcnError, Instruction, Operand
from ladder.simulate.gcn.wave import Wave, literal_bits

Step = Callable[[Wave], Any]
Number = Any
"""A float32, or integer, of numpy."""

ARITHMETIC: dict[str, Callable[..., Number]] = {
    "add_f32": lambda a, b: a + b,
    "sub_f32": lambda a, b: a - b,
    "mul_f32": lambda a, b: a * b,
    "min_num_f32": smaller,
    "max_num_f32": larger,
    "fmamk_f32": lambda a, k, b: fma(a, k, b),
    "fmaak_f32": fma,
    "ceil_f32": np.ceil,
    "floor_f32": np.floor,
    "trunc_f32": np.trunc,
    "rndne_f32": np.rint,
}
"""Mnemonic behind ``s_`` -> float32 of float32 sources."""

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
"""Relations; with ``n`` before them, and ``u``, their opposites, which NaN meets."""


def _read(operand: Operand, dtype: type) -> Callable[[Wave], Number]:
    """Return what reads a source as a number of a type."""
    if operand.negated or operand.absolute:
        raise GcnError("the emulator does not know scalar floats with a changed sign")
    if operand.kind == "s":
        index = operand.index
        return lambda w: np.uint32(w.scalar(index)).view(dtype)
    if operand.kind != "literal":
        raise GcnError("a scalar instruction reads a vector register")
    value = np.uint32(literal_bits(operand.text, "f32" if dtype is np.float32 else "u32")).view(dtype)
    return lambda w: value


def _writing(
    i: Instruction, function: Callable[..., Number], sources: list[Callable[[Wave], Number]]
) -> Step:
    to = i.operands[0].index

    def step(w: Wave) -> None:
        with np.errstate(all="ignore"):
            value = np.asarray(function(*(source(w) for source in sources)))
        w.set_scalar(to, int(value.view(np.uint32)), 1)

    return step


def _compare(i: Instruction, relation: str) -> Step:
    a, b = (_read(operand, np.float32) for operand in i.operands)
    opposite = relation not in COMPARISONS
    test = COMPARISONS["o" if relation == "u" else relation[1:] if opposite else relation]

    def step(w: Wave) -> None:
        w.scc = int(bool(test(a(w), b(w))) != opposite)

    return step


def translate(i: Instruction) -> Step | None:
    """Return the closure of a scalar instruction of float32; None if it is none that is known."""
    if i.op.startswith("v_s_"):
        function = SPECIAL.get(i.op.removeprefix("v_s_"))
        return function and _writing(i, function, [_read(i.operands[1], np.float32)])
    name = i.op.removeprefix("s_")
    if name in ARITHMETIC:
        return _writing(i, ARITHMETIC[name], [_read(operand, np.float32) for operand in i.operands[1:]])
    if name == "fmac_f32":
        return _writing(
            i,
            lambda a, b, to: fma(a, b, to),
            [_read(o, np.float32) for o in (*i.operands[1:], i.operands[0])],
        )
    if name in CONVERSIONS:
        dtype, convert = CONVERSIONS[name]
        return _writing(i, convert, [_read(i.operands[1], dtype)])
    if name.startswith("cmp_") and name.endswith("_f32"):
        return _compare(i, name.removeprefix("cmp_").removesuffix("_f32"))
    return None
