"""Chains on AMD GPUs: vectors in TIR, V_EXP and V_RCP, lanes by DPP, bfloat16 by its bits.

TVM's ROCm target takes bfloat16 for uint16 from some pass on, and a conversion of reinterpreted bits for one
of whole numbers: here no value but what is loaded or stored has that type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir import scalars
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.conversions import round_through
from ladder.lower.chain.dialect import Dialect, Early
from ladder.lower.chain.indices import Index
from ladder.lower.chain.llvm_functions import (
    LLVM_FUNCTIONS,
    bfloat16_bits,
    bfloat16_of,
    through_bfloat16,
    widened_bits,
)
from ladder.lower.chain.nest import BYTES
from ladder.lower.chain.rocm_functions import cosine, power, sine
from ladder.lower.gpu.emission import TirMachine
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.decode import reads_fnuz
from ladder.lower.rocm.machine import NARROW, UPPER_HALVES, RocmMachine
from schedules.schedule import check
from schedules.waves import MOST_THREADS

LOG2_E = 1.4426950408889634

LEAST_EXPONENT, LEAST_NORMAL = -126.0, 2.0**-126

FAR = 2.0**96
"""Beyond which the reciprocal of a float32 is near the subnormal ones, or would be one of them."""


def _product(a: Expr, b: Expr) -> Expr:
    """Return a product that no sum takes in."""
    if str(a.ty.dtype) not in ("float16", "float32"):
        return LLVM_FUNCTIONS["mul"](a, b)
    return d.separate(scalars.multiply(a, b))


def _exponential(x: Expr) -> Expr:
    """Return a power of two: V_EXP makes 0 of subnormal results, which are taken 64 binary digits higher."""
    if str(x.ty.dtype) != "float32":
        return T.exp(x)
    power = scalars.kept(x * T.float32(LOG2_E))
    low = power < T.float32(LEAST_EXPONENT)
    found = d.intrinsic("float32", "llvm.amdgcn.exp2", power + _either(low, 64.0, 0.0))
    return found * _either(low, 2.0**-64, 1.0)


def _quotient(x: Expr, y: Expr) -> Expr:
    """Return a product with a reciprocal, of a divisor that V_RCP and its result hold."""
    if str(y.ty.dtype) != "float32":
        return tirx.div(x, y)
    y = scalars.kept(y)
    size = T.fabs(y)
    outer = tirx.Select(size < T.float32(1 / FAR), T.float32(2.0**32), T.float32(1))
    scale = scalars.kept(tirx.Select(size > T.float32(FAR), T.float32(2.0**-32), outer))
    return x * d.intrinsic("float32", "llvm.amdgcn.rcp", y * scale) * scale


def _exponential_ftz(x: Expr) -> Expr:
    if str(x.ty.dtype) != "float32":
        return T.exp(x)
    return d.intrinsic("float32", "llvm.amdgcn.exp2", x * T.float32(LOG2_E))


def _quotient_ftz(x: Expr, y: Expr) -> Expr:
    if str(y.ty.dtype) != "float32":
        return tirx.div(x, y)
    return x * d.intrinsic("float32", "llvm.amdgcn.rcp", y)


def _inverse_root(x: Expr) -> Expr:
    """Return V_RSQ, of what is subnormal 24 binary digits higher."""
    if str(x.ty.dtype) != "float32":
        return T.rsqrt(x)
    x = scalars.kept(x)
    low = x < T.float32(LEAST_NORMAL)
    found = d.intrinsic("float32", "llvm.amdgcn.rsq", x * _either(low, 2.0**24, 1.0))
    return found * _either(low, 2.0**12, 1.0)


def _either(condition: Expr, yes: float, no: float) -> Expr:
    return tirx.Select(condition, T.float32(yes), T.float32(no))


class RocmDialect(Dialect):
    """AMD GPUs, of waves with 64 lanes or 32."""

    functions: ClassVar[Mapping[str, Callable[..., Expr]]] = {
        **LLVM_FUNCTIONS,
        "mul": _product,
        "square": partial(scalars.square, product=_product),
        "sin": sine,
        "cos": cosine,
        "pow": power,
    }
    cheap: ClassVar[Mapping[str, Callable[..., Expr]]] = {
        "exp": _exponential,
        "exp_ftz": _exponential_ftz,
        "div": _quotient,
        "div_ftz": _quotient_ftz,
        "rsqrt": _inverse_root,
    }
    machine: ClassVar[type[TirMachine]] = RocmMachine

    def start(self, blocks: Expr, threads: int, words: int, inputs: Sequence[Early]) -> tuple[Expr, Expr]:
        check(threads <= MOST_THREADS, f"a block has at most {MOST_THREADS} threads, got {threads}")
        most = self.device.shared_per_block
        check(4 * words <= most, f"a block has at most {most} bytes of LDS, got {4 * words}")
        block, thread = d.launch(blocks, threads)
        if words:
            self.shared = d.shared(words)
        return block, thread

    def sync(self) -> None:
        d.block_sync(self.device)

    def load(
        self, registers: Any, first: int, count: int, buffer: Any, index: Index, *, once: bool = False
    ) -> None:
        width = 4 * count // BYTES.get(str(buffer.dtype), 4)
        loaded = buffer[(*index[:-1], d.lanes(index[-1], width))]
        kind = "uint32" if count == 1 else f"uint32x{count}"
        b.store(registers, d.as_type(loaded, kind), d.lanes(first, count))

    def load_one(self, register: Any, buffer: Any, index: Index) -> None:
        b.store(register, T.reinterpret(str(register.dtype), buffer[index]), 0)

    def store(self, buffer: Any, index: Index, words: Sequence[Expr]) -> None:
        dtype = str(buffer.dtype)
        width = 4 * len(words) // BYTES.get(dtype, 1)
        value = d.as_type(d.vector(list(words)), dtype if width == 1 else f"{dtype}x{width}")
        b.store(buffer, value, *index[:-1], d.lanes(index[-1], width))

    def shuffle(self, value: Expr, distance: int, thread: Expr) -> Expr:
        dtype = str(value.ty.dtype)
        return d.exchange(value, dtype, thread, distance)

    # ---- bfloat16 ------------------------------------------------------------------------------------
    def widened(self, bits: Expr, dtype: str, wanted: str) -> Expr:
        if dtype != "bfloat16":
            return super().widened(bits, dtype, wanted)
        return T.reinterpret("float32", T.Cast("uint32", bits) << T.uint32(16))

    def element(self, buffer: Any, index: Index, dtype: str, wanted: str) -> Expr:
        if dtype != "bfloat16":
            return super().element(buffer, index, dtype, wanted)
        return self.widened(T.reinterpret("uint16", buffer[index]), dtype, wanted)

    def unchanged(self, value: Expr, dtype: str) -> Expr | None:
        return widened_bits(value) if dtype == "bfloat16" else super().unchanged(value, dtype)

    def rounded(self, value: Expr, dtype: str) -> Expr:
        if dtype != "bfloat16":
            return super().rounded(value, dtype)
        return bfloat16_of(value, b.bind)

    def rounded_through(self, value: Expr, dtype: str, name: Callable[[Expr], Expr]) -> Expr:
        return through_bfloat16(value, name) if dtype == "bfloat16" else round_through(value, dtype)

    def rounded_pair(self, low: Expr, high: Expr, dtype: str) -> Expr:
        if dtype == "float16":
            return d.as_type(T.Shuffle([T.Cast("float16", value) for value in (low, high)], [0, 1]), "uint32")
        words = [b.bind(bfloat16_bits(value, b.bind)) for value in (high, low)]
        return d.intrinsic("uint32", "llvm.amdgcn.perm", *words, T.uint32(UPPER_HALVES))

    # ---- 8-bit codes ---------------------------------------------------------------------------------
    def narrow_pair(self, low: Expr, high: Expr, dtype: str) -> Expr:
        """Convert: of CDNA3, whose fnuz codes mean half of what they mean in OCP types, half the values.

        -0 becomes 0 there.
        """
        factor = T.float32(0.5 if reads_fnuz(self.device, dtype) else 1.0)
        values = (T.reinterpret(word, dtype="float32") * factor for word in (low, high))
        name = f"llvm.amdgcn.cvt.pk.{NARROW[dtype]}.f32"
        return b.bind(d.as_type(d.intrinsic("int32", name, *values, T.int32(0), T.bool(False)), "uint32"))
