"""Chains in PTX: vector accesses, shuffles, approximate instructions, early launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.scalars import reinterpreted
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.conversions import FORMATS
from ladder.lower.chain.dialect import Dialect, Early
from ladder.lower.chain.element_types import HALVES
from ladder.lower.chain.indices import Index
from ladder.lower.cuda.functions import CHEAP, FUNCTIONS, by_inverse, by_near_inverse, largest, rounded_pair
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.emission import TirMachine, helper, widened_pair
from targets import TileDevice

ACCESS = {4: ".v4", 2: ".v2", 1: ""}
"""Words of an access -> its suffix."""

WORDS = 4
"""Words of the widest access."""

COMBINED = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "int32": "u32",
    "int64": "u64",
}
"""Types of which elements are combined in memory -> PTX's."""

NARROW_PAIR = {"fp8_e4m3": "cvt.rn.satfinite.e4m3x2.f32", "fp8_e5m2": "cvt.rn.satfinite.e5m2x2.f32"}
"""Two float32 to two 8-bit floats, rounded once (PTX ISA, cvt)."""


STOP = """
static __device__ __forceinline__ void ladder_stop_where(int wrong) {
  if (wrong) __trap();
}
"""


def _as_combined(operation: str, value: Expr, dtype: str) -> Expr:
    """Return an element as PTX combines it: sums of integers are those of their bits."""
    if dtype in HALVES:
        return T.reinterpret("uint16", value)
    return reinterpreted(f"u{dtype}", value) if dtype.startswith("int") and operation == "add" else value


def _combine_ordered(operation: str, address: Expr, value: Expr) -> None:
    """Emit the largest, or least, of a float32 in memory and another: their bits are ordered as integers.

    Those of negative numbers in reverse, as unsigned ones. NaN becomes what lies beyond all numbers.
    """
    largest = operation == "max"
    bits = b.bind(T.reinterpret("int32", value))
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits = b.bind(T.Select(is_nan, 0x7FFFFFFF if largest else -1, bits))
    with b.when(bits >= 0):
        b.ptx(f"red.global.{operation}.s32", address, bits)
    with b.when(bits < 0):
        b.ptx(f"red.global.{'min' if largest else 'max'}.u32", address, T.reinterpret("uint32", bits))


class CudaDialect(Dialect):
    """NVIDIA GPUs."""

    functions: ClassVar[Mapping[str, Callable[..., Expr]]] = FUNCTIONS
    cheap: ClassVar[Mapping[str, Callable[..., Expr]]] = CHEAP
    machine: ClassVar[type[TirMachine]] = TirMachine

    def __init__(self, device: TileDevice) -> None:
        super().__init__(device)
        self.overlap = Overlap(device)

    @property
    def noalias(self) -> bool:
        """A kernel that starts early must not read before it has waited, whatever is known of arguments."""
        return not self.overlap.possible

    @property
    def by_inverse(self) -> Callable[[Expr, Expr, Expr], Expr] | None:
        return by_inverse

    @property
    def by_near_inverse(self) -> Callable[[Expr, Expr], Expr] | None:
        return by_near_inverse

    def start(self, blocks: Expr, threads: int, words: int, inputs: Sequence[Early]) -> tuple[Expr, Expr]:
        self.overlap.declare(shared=bool(words))
        b.device()
        (block,) = b.block_index([blocks])
        thread = b.thread_index(threads)
        if words:
            pool = b.SharedPool()
            self.shared = pool.alloc((words,), "uint32", align=128)
            pool.commit()
        self.overlap.release()
        if self.overlap.possible and inputs:
            self.prefetch(b.bind(block * threads + thread), inputs)
        self.overlap.wait()
        return block, thread

    def prefetch(self, first: Expr, inputs: Sequence[Early]) -> None:
        """Bring inputs into L2, a line per thread: a model's parameters have left it since their last use."""
        for lines, address in inputs:
            with b.when(first < lines):
                b.ptx("prefetch.global.L2", address(first))

    def sync(self) -> None:
        b.block_sync()

    def load(
        self, registers: Any, first: int, count: int, buffer: Any, index: Index, *, once: bool = False
    ) -> None:
        space = "shared" if self.shared is not None and buffer.same_as(self.shared) else "global"
        # With ``.nc`` ptxas would move loads before `Overlap.wait`.
        keep = ".L1::no_allocate" if once else ""
        target = (registers[first + word] for word in range(count))
        b.ptx(f"ld.{space}{keep}{ACCESS[count]}.u32", *target, buffer.ptr_to(list(index)))

    def load_one(self, register: Any, buffer: Any, index: Index) -> None:
        bits = str(register.dtype).removeprefix("uint")
        b.ptx(f"ld.global.u{bits}", register[0], buffer.ptr_to(list(index)))

    def store(self, buffer: Any, index: Index, words: Sequence[Expr]) -> None:
        b.ptx(f"st.global{ACCESS[len(words)]}.u32", buffer.ptr_to(list(index)), *words)

    def combine(self, operation: str, buffer: Any, index: Index, dtype: str, found: Sequence[Expr]) -> None:
        if dtype == "float32" and operation != "add":
            for lane, value in enumerate(found):
                _combine_ordered(operation, buffer.ptr_to([*index[:-1], index[-1] + lane]), value)
            return
        spelling, each = COMBINED[dtype], 1
        if dtype in HALVES and len(found) > 1:
            found, spelling, each = self.packed(found, dtype), f"{spelling}x2", 2
        else:
            found = [_as_combined(operation, self.rounded(value, dtype), dtype) for value in found]
        if dtype.startswith("int") and operation != "add":
            spelling = spelling.replace("u", "s")
        wide = "vector.red" in self.device.features and "f" in spelling and dtype != "float64"
        most = min(len(found) & -len(found), WORDS) if wide else 1
        rounding = ".noftz" if dtype in HALVES else ""
        for first in range(0, len(found), most):
            at = buffer.ptr_to([*index[:-1], index[-1] + first * each])
            spelled = f"red.global.{operation}{rounding}{ACCESS[most]}.{spelling}"
            b.ptx(spelled, at, *found[first : first + most])

    def add_shared(self, place: Expr, kind: str, value: Expr) -> None:
        b.ptx(f"red.shared.add.{kind}", self.shared.ptr_to([place]), value)

    def row_number(self, value: Expr, extent: Expr, from_end: bool) -> Expr:
        """Return the first row where data names none: at a branch here, further loads would wait for it."""
        assert self.no_row is not None
        number = b.bind(value)
        extent = T.Cast(str(number.ty.dtype), extent)
        if from_end:
            number = b.bind(T.Select(number < 0, number + extent, number))
        beyond = b.bind(tirx.Or(number < 0, number >= extent))
        self.no_row.set(T.Select(beyond, 1, self.no_row.value))
        return T.Select(beyond, 0, T.Cast("int32", number))

    def finish(self) -> None:
        if self.no_row is not None:
            b.emit(b.call_inline("ladder_stop_where", STOP, "void", self.no_row.value))

    def shuffle(self, value: Expr, distance: int, thread: Expr) -> Expr:
        return b.shuffle_xor(value, distance)

    def largest(self, value: Expr, dtype: str) -> Expr | None:
        return largest(value, dtype) if "redux" in self.device.features else None

    def rounded_pair(self, low: Expr, high: Expr, dtype: str) -> Expr:
        return rounded_pair(low, high, dtype)

    def encoded(self, value: Expr, dtype: str, within: bool = False) -> Expr:
        """Convert; the code behind that of the largest number is what lies beyond it."""
        if "fp8" not in self.device.features:
            return super().encoded(value, dtype, within)
        pair = self.narrow_pair(reinterpreted("uint32", value), T.uint32(0), dtype)
        if within:
            return T.Cast("int32", pair & T.uint32(0xFF))
        beyond = T.fabs(value) >= T.float32(FORMATS[dtype].beyond)
        return T.Cast("int32", (pair & T.uint32(0xFF)) + T.Cast("uint32", beyond))

    def decoded(self, code: Expr, dtype: str) -> Expr:
        if "fp8" not in self.device.features:
            return super().decoded(code, dtype)
        pair = widened_pair(dtype, T.Cast("uint32", code), 0)
        return T.Cast("float32", T.reinterpret("float16", T.Cast("uint16", pair)))

    def narrow_pair(self, low: Expr, high: Expr, dtype: str) -> Expr:
        name = f"ladder_narrow_pair_{dtype}"
        text = f"{{.reg .b16 h; {NARROW_PAIR[dtype]} h, %2, %1; mov.b32 %0, {{h, h}};}}"
        return b.bind(b.call_inline(name, helper(name, text, 2, "f"), "uint32", low, high))


def prefetch_by_first(inputs: Iterable[Early], first: Expr, thread: Expr, threads: int) -> None:
    """Bring inputs into L2, by the threads of the ``first`` block."""
    for lines, address in inputs:
        for start in range(0, lines, threads):
            with b.when(T.And(first, thread + start < lines)):
                b.ptx("prefetch.global.L2", address(thread + start))
