"""Decoder instructions on CDNA: V_PERM, V_BFI and packed float16; bfloat16 by way of float32.

Semantics: AMD Instinct MI200 and MI300 ISA, "VALU instructions".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.emission import TirMachine
from ladder.lower.gpu.machine import SELECT
from ladder.lower.rocm.dialect import as_type, intrinsic
from tile_types import TirOps, TType

COLUMNS = {"x": 0xF0, "y": 0xCC, "z": 0xAA}
"""Truth tables of the three operands of a lop3."""

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "&": lambda left, right: left & right,
    "|": lambda left, right: left | right,
    "^": lambda left, right: left ^ right,
}

Form = Any
"""An operand's name, ``("~", form)`` or ``(operator, form, form)``."""

SIGN_SELECTORS = {1: 8, 3: 9, 5: 10, 7: 11}
"""V_PERM's selectors that repeat the sign of a byte of the pair; other bytes have none."""

SPREAD = 0x0C010C00
"""V_PERM's selector that puts a zero above each of the two low bytes."""

NARROW = {"fp4_e2m1": "fp4", "fp8_e4m3": "fp8", "fp8_e5m2": "bf8"}
"""LLVM's names of narrow floats."""

CONVERTED = {"float16": ("float16x2", "f16"), "bfloat16": ("int16x2", "bf16")}
"""TIR's type of two lanes that a conversion makes, which TVM has none of bfloat16 for, and LLVM's name."""

PLACES: Mapping[str, Callable[[int], Any]] = {"fp4_e2m1": T.int32, "fp8_e4m3": T.bool, "fp8_e5m2": T.bool}
"""What tells conversions which byte, or whether the upper half of a word, holds the two codes."""

UPPER_HALVES = 0x07060302
"""V_PERM's selector of the upper halves of two words."""

ROUND_BFLOAT = 0x7FFF


@cache
def bitwise(table: int) -> Form:
    """Return the shortest form of and, or, xor and not that has a truth table (PTX's immLut)."""
    if table == SELECT:  # V_BFI
        return "|", ("&", "x", "y"), ("&", ("~", "x"), "z")
    forms: dict[int, Form] = {value: name for name, value in COLUMNS.items()}
    forms |= {value ^ 0xFF: ("~", name) for name, value in COLUMNS.items()}
    while table not in forms:
        known = list(forms.items())
        for sign, perform in OPERATIONS.items():
            for first, left in known:
                for second, right in known:
                    forms.setdefault(perform(first, second) & 0xFF, (sign, left, right))
    return forms[table]


class RocmMachine(TirMachine):
    """Emits decoder instructions for AMD GPUs.

    While ``exact``, float32 results for bfloat16 operands are cut off rather than rounded: where a
    recipe is proven so (`ladder.lower.rocm.decode`), none has bits to round.
    """

    def _do_lop3(self, x: Expr, y: Expr, z: Expr, table: int) -> Expr:
        operands = {"x": x, "y": y, "z": z}

        def build(form: Form) -> Expr:
            if isinstance(form, str):
                return operands[form]
            if form[0] == "~":
                return build(form[1]) ^ T.uint32(0xFFFFFFFF)
            return OPERATIONS[form[0]](build(form[1]), build(form[2]))

        return build(bitwise(table))

    def _do_permute(self, x: Expr, y: Expr, selector: Expr) -> Expr:
        # V_PERM numbers the bytes of its second operand first.
        return intrinsic("uint32", "llvm.amdgcn.perm", y, x, permute_selector(selector))

    def _do_select_bytes(self, x: Expr, y: Expr, selector: Expr) -> Expr:
        return intrinsic("uint32", "llvm.amdgcn.perm", y, x, selector)

    def _float(self, operation: str, core: str, *operands: Expr) -> Expr:
        if core == "float16":
            values = [as_type(operand, "float16x2") for operand in operands]
            return as_type(_calculate(operation, "float16x2", *values), "uint32")
        halves = [bfloat_halves(operand) for operand in operands]
        low, high = (_calculate(operation, "float32", *(half[i] for half in halves)) for i in (0, 1))
        return (join_exact if self.exact else join_bfloat)(low, high)

    def _do_float_sub(self, x: Expr, y: Expr, core: str) -> Expr:
        return self._float("sub", core, x, y)

    def _do_float_mul(self, x: Expr, y: Expr, core: str) -> Expr:
        return self._float("mul", core, x, y)

    def _do_float_fma(self, x: Expr, y: Expr, z: Expr, core: str) -> Expr:
        return self._float("fma", core, x, y, z)

    def _do_halves(self, low: Expr, high: Expr) -> Expr:
        parts = [T.Cast("float16", T.reinterpret(part, dtype="float32")) for part in (low, high)]
        return as_type(T.Shuffle(parts, [0, 1]), "uint32")

    def _do_convert(self, word: Expr, scale: Expr, core: str, codes: str, place: int) -> Expr:
        dtype, name = CONVERTED[core]
        factor, chosen = as_type(scale, "float32"), PLACES[codes](place)
        found = intrinsic(dtype, f"llvm.amdgcn.cvt.scalef32.pk.{name}.{NARROW[codes]}", word, factor, chosen)
        return as_type(found, "uint32")

    def _do_reference(self, code: Expr, ttype: TType, core: str) -> Expr:
        if core != "bfloat16":
            return super()._do_reference(code, ttype, core)
        value = T.Cast("float32", ttype.evaluate(code, TirOps()))  # TVM casts no bfloat16 on AMD GPUs
        return join_bfloat(value, T.float32(0))

    def _do_narrow(self, x: Expr, core: str) -> Expr:
        return self._narrow(x, core, 1.0)

    def _narrow(self, x: Expr, core: str, factor: float) -> Expr:
        values = as_type(x, "float16x2")
        wide = (T.Cast("float32", T.Shuffle([values], [i])) * T.float32(factor) for i in (0, 1))
        none = (T.int32(0), T.bool(False))
        packed = intrinsic("int32", f"llvm.amdgcn.cvt.pk.{NARROW[core]}.f32", *wide, *none)
        return as_type(packed, "uint32")


class FnuzMachine(RocmMachine):
    """The same where fp8 codes stand for half their value."""

    def _do_narrow(self, x: Expr, core: str) -> Expr:
        return self._narrow(x, core, 0.5)


FUSED = {"float16x2": "llvm.fma.v2f16", "float32": "llvm.fma.f32"}


def _calculate(operation: str, dtype: str, x: Expr, y: Expr, *addend: Expr) -> Expr:
    """Return a sum or product of values of a type, rounded once."""
    if operation == "fma":
        return intrinsic(dtype, FUSED[dtype], x, y, *addend)
    return x - y if operation == "sub" else x * y


def permute_selector(selector: Expr) -> Expr:
    """Return PTX's selector, a nibble for each byte, as V_PERM's, a byte for each.

    Where a selector is computed, its nibbles are below 8.
    """
    value = getattr(selector, "value", None)
    if value is not None:
        nibbles = [int(value) >> 4 * i & 0xF for i in range(4)]
        places = [SIGN_SELECTORS[n & 7] if n & 8 else n for n in nibbles]
        return T.uint32(sum(place << 8 * i for i, place in enumerate(places)))
    halves = b.bind(intrinsic("uint32", "llvm.amdgcn.perm", selector, selector, T.uint32(SPREAD)))
    return b.bind((halves | halves << T.uint32(4)) & T.uint32(0x07070707))


def bfloat_halves(word: Expr) -> tuple[Expr, Expr]:
    """Return two bfloat16 lanes as float32."""
    low, high = word << T.uint32(16), word & T.uint32(0xFFFF0000)
    return T.reinterpret(low, dtype="float32"), T.reinterpret(high, dtype="float32")


def join_exact(low: Expr, high: Expr) -> Expr:
    """Cut two float32 values off to bfloat16, in one word."""
    words = [T.reinterpret(value, dtype="uint32") for value in (high, low)]
    return intrinsic("uint32", "llvm.amdgcn.perm", *words, T.uint32(UPPER_HALVES))


def join_bfloat(low: Expr, high: Expr) -> Expr:
    """Round two float32 values to bfloat16, ties to even, in one word. Operands are no NaN."""
    bits = [b.bind(T.reinterpret(value, dtype="uint32")) for value in (low, high)]
    odd = [(value >> T.uint32(16)) & T.uint32(1) for value in bits]
    rounded = [b.bind(value + (one + T.uint32(ROUND_BFLOAT))) for value, one in zip(bits, odd, strict=True)]
    return intrinsic("uint32", "llvm.amdgcn.perm", rounded[1], rounded[0], T.uint32(UPPER_HALVES))
