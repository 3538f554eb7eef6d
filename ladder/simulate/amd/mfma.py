"""MFMA: matrix products of a wave of 64 lanes.

Layouts of one-block instructions (AMD Instinct MI200 and MI300 ISA, "Matrix Arithmetic Instructions",
VGPR layouts of "Dense Matrix Layout"), with N the number of columns, 16 or 32, and p the elements of a
lane's operand:

* A[i][k]: lane N * (k // p) + i, element k % p; B[k][j]: lane N * (k // p) + j, element k % p;
* D[i][j]: lane N * (i // 4 % (64 // N)) + j, register 4 * (i // (256 // N)) + i % 4.

Products are summed in float64 and rounded once. CDNA2 reads subnormal 16-bit operands as zeros and writes
subnormal sums as zeros, as its V_DOT2 does (PyTorch, "Numerical accuracy", reduced precision on MI200
devices); CDNA3 keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ladder.simulate.amd.arithmetic import LEAST_SUM, SMALLEST, flushed
from ladder.simulate.cohort import Cohort
from ladder.simulate.program import Read
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import NUMPY, Array, table_of

LANES = 64

SPELLING = re.compile(
    r"llvm\.amdgcn\.mfma\.(?P<sums>f32|i32)\.(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)\.?"
    r"(?P<a>f16|bf16|f32|i8|fp8|bf8)(?P<rest>\.1k|\.fp8|\.bf8)?"
)

INTRINSIC, OF_WORDS = "llvm.amdgcn.mfma.", "ladder_mfma_"
"""How names of intrinsics begin, and those of functions that take vectors of bfloat16 as words."""

FNUZ = {"fp8": "float8_e4m3fnuz", "bf8": "float8_e5m2fnuz"}
OCP = {"fp8": "float8_e4m3fn", "bf8": "float8_e5m2"}
WIDE = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "i8": "int8"}


@dataclass(frozen=True)
class Core:
    """The matrix core of one architecture.

    arch: Its name.
    products: What it multiplies: spelling of A's type -> the (M, K) of its instructions without blocks.
    bytes_as: What 8-bit floats mean.
    flushes: Whether it reads and writes subnormal numbers as zeros.
    lanes: Of a wave.
    """

    arch: str
    products: Mapping[str, tuple[tuple[int, int], ...]]
    bytes_as: Mapping[str, str]
    flushes: bool
    lanes: int = LANES


CDNA2 = Core(
    "gfx90a",
    {
        "f16": ((16, 16), (32, 8)),
        "bf16.1k": ((16, 16), (32, 8)),
        "i8": ((16, 16), (32, 8)),
        "f32": ((16, 4), (32, 2)),
    },
    {},
    True,
)
CDNA3 = Core(
    "gfx942",
    {
        "f16": ((16, 16), (32, 8)),
        "bf16.1k": ((16, 16), (32, 8)),
        "i8": ((16, 32), (32, 16)),
        "fp8": ((16, 32), (32, 16)),
        "bf8": ((16, 32), (32, 16)),
        "f32": ((16, 4), (32, 2)),
    },
    FNUZ,
    False,
)
CDNA4 = Core(
    "gfx950",
    {
        "f16": ((16, 16), (32, 8), (16, 32), (32, 16)),
        "bf16.1k": ((16, 16), (32, 8)),
        "bf16": ((16, 32), (32, 16)),
        "i8": ((16, 32), (32, 16), (16, 64), (32, 32)),
        "fp8": ((16, 32), (32, 16)),
        "bf8": ((16, 32), (32, 16)),
        "f32": ((16, 4), (32, 2)),
    },
    OCP,
    False,
)


@dataclass(frozen=True)
class Product:
    """One instruction: extents, and element types of A and B."""

    m: int
    k: int
    a: str
    b: str

    @property
    def integer(self) -> bool:
        """Whether sums are int32."""
        return self.a == "int8"


def parse(name: str, core: Core) -> Product:
    """Read an intrinsic's name.

    Raises UnknownCallError if the architecture has no such instruction, or the simulator does not know it.
    """
    spelled = INTRINSIC + name.removeprefix(OF_WORDS).replace("_", ".") if name.startswith(OF_WORDS) else name
    match = SPELLING.fullmatch(spelled)
    if match is None:
        raise UnknownCallError(f"the simulator does not know what {name} does")
    a, rest = match["a"], match["rest"] or ""
    key = a + rest if rest == ".1k" else a
    extents = int(match["m"]), int(match["k"])
    if match["m"] != match["n"] or extents not in core.products.get(key, ()):
        raise UnknownCallError(f"{core.arch} has no {name}, or the simulator does not know it")
    b = rest[1:] if rest in (".fp8", ".bf8") else a
    return Product(*extents, *(core.bytes_as.get(kind) or WIDE[kind] for kind in (a, b)))


def operand(words: Array, dtype: str) -> Array:
    """Return the elements ``[waves, 64, p]`` of an operand given by its bytes, as float32."""
    kind = NUMPY[dtype]
    held = np.ascontiguousarray(words).view(np.uint8)
    if kind.itemsize > 2 or dtype == "int8":
        exact: Array = held.view(kind).astype(np.float32)
        return exact
    values: Array = table_of(dtype)[held.view(np.uint8 if kind.itemsize == 1 else np.uint16)]
    return values


def rows_of(elements: Array, rows: int) -> Array:
    """Return A (or B transposed) ``[waves, rows, k]`` from a lane's elements ``[waves, 64, p]``."""
    waves, _, count = elements.shape
    parts = elements.reshape(waves, LANES // rows, rows, count)
    return parts.transpose(0, 2, 1, 3).reshape(waves, rows, -1)


def gather_d(registers: Array, rows: int) -> Array:
    """Return D ``[waves, rows, rows]`` from accumulators ``[waves, 64, rows * rows / 64]``."""
    waves = registers.shape[0]
    parts = registers.reshape(waves, LANES // rows, rows, -1, 4)  # row group, column, step, row
    return parts.transpose(0, 3, 1, 4, 2).reshape(waves, rows, rows)


def scatter_d(d: Array) -> Array:
    """Return accumulators from D: the inverse of `gather_d`."""
    waves, rows, _ = d.shape
    parts = d.reshape(waves, -1, LANES // rows, 4, rows)
    return parts.transpose(0, 2, 4, 1, 3).reshape(waves, LANES, -1)


def multiply(what: Product, core: Core, a: Array, b: Array, c: Array) -> Array:
    """Return the accumulators after one instruction.

    what, core: The instruction, and what executes it.
    a, b: Bytes of the operands, ``[waves, 64, bytes]``.
    c: float32 or int32 accumulators ``[waves, 64, n]``.
    """
    factors = []
    for words, dtype in ((a, what.a), (b, what.b)):
        elements = operand(words, dtype)
        if core.flushes and dtype in SMALLEST:
            elements = flushed(elements, SMALLEST[dtype])
        factors.append(rows_of(elements, what.m).astype(np.float64))
    sums = factors[0] @ factors[1].transpose(0, 2, 1) + gather_d(c, what.m)
    if what.integer:
        return scatter_d(sums.astype(np.int64).astype(np.int32))
    result = sums.astype(np.float32)
    if core.flushes and what.a in SMALLEST:
        result = flushed(result, LEAST_SUM)
    return scatter_d(result)


def rows(core: Core) -> dict[str, Callable[[Translator, CallView], Read]]:
    """Return the rows of an architecture's matrix instructions; newer names have a dot before the types."""
    row, names = _translator_of(core), []
    for kind, extents in core.products.items():
        sums = "i32" if kind == "i8" else "f32"
        types = [f"{kind}.{other}" for other in core.bytes_as] if kind in core.bytes_as else [kind]
        for (m, k), dot, spelled in product(extents, (".", ""), types):
            names.append(f"{INTRINSIC}{sums}.{m}x{m}x{k}{dot}{spelled}")
    names += [f"{OF_WORDS}f32_{m}x{m}x{k}_bf16" for m, k in core.products.get("bf16", ())]
    return dict.fromkeys(names, row)


def _translator_of(core: Core) -> Callable[[Translator, CallView], Read]:
    def translate(t: Translator, call: CallView) -> Read:
        what = parse(call.name, core)
        if any(t.number(value) for value in call.operands[3:]):
            raise UnknownCallError(f"{call.name} with broadcast or permuted operands")
        size = what.m * what.k // LANES * NUMPY[what.a].itemsize
        shape = (LANES, what.m * what.m // LANES)
        return row_of("MFMA", t, call, call.operands[:3], size, shape, partial(multiply, what, core))

    return translate


def row_of(
    name: str,
    t: Translator,
    call: CallView,
    given: Sequence[Any],
    size: int,
    shape: tuple[int, int],
    multiply: Callable[[Array, Array, Array], Array],
) -> Read:
    """Return what reads the operands of a product of a whole wave, and multiplies them.

    given: Both operands, and the sums that the products are added to.
    size, shape: Bytes of a lane's operand; lanes and registers of the sums.
    """
    a, b, sums = (t.read(value) for value in given)
    types, kind = [str(value.ty) for value in given[:2]], NUMPY[call.dtype]

    def read(c: Cohort) -> Array:
        c.require_whole(name, call.statement)
        c.machine.counts["mfma"] += c.count
        left, right = (as_bytes(c, value(c), size, dtype) for value, dtype in zip((a, b), types, strict=True))
        return multiply(left, right, np.broadcast_to(np.asarray(sums(c), kind), (c.count, *shape)))

    return read


def as_bytes(c: Cohort, value: Any, size: int, dtype: str) -> Array:
    """Return a scalar or vector as bytes ``[waves, 64, size]``."""
    kind = NUMPY[dtype]
    held = np.asarray(value, kind)
    count = size // kind.itemsize
    if count == 1 and held.ndim < 3:
        held = held[..., None]
    if size % kind.itemsize or (held.ndim and held.shape[-1] not in (1, count)):
        raise UnknownCallError(f"a matrix operand of {size} bytes is given as {dtype}")
    return np.ascontiguousarray(np.broadcast_to(held, (c.count, c.lanes, count))).view(np.uint8)
