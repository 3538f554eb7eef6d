"""The normal form of a GEMM tile graph: what every GEMM pipeline lowers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ladder.ir.windows import Windows, windows_from
from tile_types import TType, get_type
from tile_types.errors import DTypeError, ShapeError, positive_number, require_kind, whole_number

ZERO_KINDS = ("none", "integer", "float")
"""How zero points are stored: absent, integers in code space, or real numbers (HQQ)."""

ACTIVATIONS = ("float16", "bfloat16", "float32", "fp8_e4m3", "fp8_e5m2", "int8")
OUTPUTS = ("float16", "bfloat16", "float32")
STORED = ("", "rows", "columns")
"""How matrices of experts lie: packed, or as a program has them, ``[E, N, K]`` or ``[E, K, N]``."""

PACKED_ROWS = 64
"""Rows of a packed tile of a weight."""

QUANTIZABLE = ("bfloat16", "float16", "float32")
"""Element types of activations that can be quantized to 8 bits on the fly."""

SMALLEST_SCALE = 2.0**-126
"""Scale of a row of zeros that is quantized: the least whose reciprocal is a normal number."""


def require_quantizable(source: str) -> None:
    """Raise `DTypeError` unless activations of this type can be quantized to 8 bits."""
    if source not in QUANTIZABLE:
        raise DTypeError(f"activations to quantize must be one of {', '.join(QUANTIZABLE)}, got {source!r}")


def has_power_scales(ttype: TType) -> bool:
    """Tell whether every scale of a block type is a power of two (e8m0)."""
    scale = ttype.metadata_named("scale")
    if scale is None:
        return False
    values = get_type(scale.ttype).probe_values()
    return bool((np.abs(np.frexp(values[np.isfinite(values)])[0]) == 0.5).all())


FLAGS = (
    *("scale", "token_scale", "bias", "masked", "power_scales", "residual", "factor"),
    *("batch_invariant", "gate_last"),
)
"""Fields of `Gemm` that are True or False."""


@dataclass(frozen=True)
class Gemm:
    """``out[m,n] = epilogue(token_scale[m] row_scale[n] factor[n] acc[m,n] + bias[n] + residual[m,n])``.

    ``acc[m,n] = sum_k A[m,k] * (value(code[n,k]) - zero[n,k//group_size]) * scale[n,k//group_size]``.
    M is always dynamic.

    Parameters
    ----------
    n, k
        Extents of the weight matrix B[N,K].
    weight
        Name of the weight's element type (a block type is split into element and scale).
    activation
        Element type of A[M,K].
    output
        Element type of the result.
    group_size
        Elements along K that share a scale; equal to ``k`` when one scale serves a row.
    scale
        Whether there are scales per group (otherwise ``row_scale`` alone).
    zero
        One of `ZERO_KINDS`.
    token_scale
        Whether row m of A was quantized with a float32 scale of its own.
    bias
        Whether a bias[N] of the output type is added.
    epilogue
        Names of unary operators applied last, in order.
    experts
        Weight matrices B[E,N,K], each for the tokens of its expert; 0: one matrix for all tokens.
        Row scales and bias have the same leading axis.
    masked
        How experts find their tokens: expert e has the first ``counts[e]`` of its M / E rows of A, or,
        if False, rows ``offsets[e]`` to ``offsets[e + 1]``. Other rows of the result are not written.
    slots
        Rows of A lie in slots of equally many rows, each of which names its expert; of about so many slots
        schedules are chosen for. 0: experts find their tokens as ``masked`` says.
    power_scales
        Whether group scales are powers of two, as those of MX types are: kernels may read exponents.
    token_group
        Elements along K that share a token scale, a multiple of 64: ``token_scale[m, k//token_group]``
        multiplies the sum over its elements; 0: one scale per row of A.
    windows
        Rows of A are windows of an image, gathered while they are read: the product is a convolution.
    factor
        Whether sums are multiplied by a float32 vector ``[N]`` that is no part of the weight.
    residual
        Whether a tensor ``[M, N]`` of the output type is added before the epilogue.
    gate
        Name of a unary operator of a gated product, or nothing. The weight is then two matrices of N / 2
        rows, one after the other, and the result is ``gate(y[m, j]) * y[m, N / 2 + j]``, where y is the
        product that this would be without it; the gate's result is rounded to the output type, as y is.
    gate_last
        Whether the operator is applied to the second half of y instead.
    stored
        How the matrices of experts lie, one of `STORED`. Those that are not packed are 16-bit floats of the
        activation type without scales, and the ranges of rows that follow each other are E ends: rows of
        expert e end before ``ends[e]``.
    batch_invariant
        Whether a row of the result has the same bits for every M and place of the row: only schedules that
        add in one order may serve it. Kernels do not depend on it.
    """

    n: int
    k: int
    weight: str
    activation: str = "float16"
    output: str = "float16"
    group_size: int = 0
    scale: bool = True
    zero: str = "none"
    token_scale: bool = False
    bias: bool = False
    epilogue: tuple[str, ...] = ()
    experts: int = 0
    masked: bool = False
    slots: int = 0
    token_group: int = 0
    power_scales: bool = False
    windows: Windows | None = None
    residual: bool = False
    factor: bool = False
    batch_invariant: bool = False
    gate: str = ""
    gate_last: bool = False
    stored: str = ""

    def __hash__(self) -> int:
        """Return the hash of what tells most problems apart: they are keys of many caches."""
        return hash((self.n, self.k, self.weight, self.activation, self.group_size))

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.group_size == 0:
            object.__setattr__(self, "group_size", self.k)
        object.__setattr__(self, "windows", windows_from(self.windows))
        if self.n < 1 or self.k < 1:
            raise ShapeError(f"a weight matrix needs N >= 1 and K >= 1, got N={self.n}, K={self.k}")
        positive_number(self.group_size, "group_size")
        if self.experts < 0 or ((self.masked or self.slots) and not self.experts):
            raise ShapeError(f"masked tokens need experts, experts={self.experts} masked={self.masked}")
        if self.token_group % 64 or (self.token_group and not self.token_scale):
            raise ShapeError(
                "token scales come per row or per multiple of 64 elements, got"
                f" token_group={self.token_group} token_scale={self.token_scale}"
            )
        self._check_windows()
        self._check_gate()
        self._check_stored()
        if self.power_scales and not self.scale:
            raise ShapeError("power_scales speaks of group scales; there are none (scale=False)")
        if self.zero not in ZERO_KINDS:
            raise ShapeError(f"zero must be one of {', '.join(ZERO_KINDS)}, got {self.zero!r}")
        for label, value, allowed in (
            ("activation", self.activation, ACTIVATIONS),
            ("output", self.output, OUTPUTS),
        ):
            if value not in allowed:
                raise DTypeError(f"{label} must be one of {', '.join(allowed)}, got {value!r}")

    def _check_kinds(self) -> None:
        for name in ("n", "k", "group_size", "experts", "slots", "token_group"):
            whole_number(getattr(self, name), f"{name} of a product")
        for name in ("weight", "activation", "output", "zero", "gate", "stored"):
            require_kind(getattr(self, name), str, f"{name} of a product is a name")
        for name in FLAGS:
            require_kind(getattr(self, name), int, f"{name} of a product is True or False")

    def _check_windows(self) -> None:
        if self.windows is None:
            return
        if self.k % self.windows.points or self.experts or self.token_group:
            raise ShapeError(
                f"windows of {self.windows.points} elements per channel take K to be a multiple of that, got"
                f" {self.k}; they have neither experts={self.experts} nor token_group={self.token_group}"
            )
        features, groups = self.windows.features, self.windows.groups
        if features and self.n > 1 and (self.n % groups or self.n // groups < features):  # 1: not known
            raise ShapeError(f"{self.n} rows are not whole groups, {groups} of {features} features and more")

    def _check_gate(self) -> None:
        if not self.gate:
            if self.gate_last:
                raise ShapeError("gate_last speaks of a gate; there is none")
            return
        others = (self.epilogue, self.windows, self.residual, self.factor, self.token_group)
        if self.n % (2 * PACKED_ROWS) or any(others):
            raise ShapeError(
                f"a gated product takes two matrices of a multiple of {PACKED_ROWS} rows, got N={self.n};"
                " it has no epilogue, windows, residual, factor or token_group"
            )

    def _check_stored(self) -> None:
        if self.stored not in STORED:
            raise ShapeError(f"matrices are stored as one of {', '.join(STORED[1:])}, got {self.stored!r}")
        if not self.stored:
            return
        plain = self.weight == self.activation and self.weight in ("float16", "bfloat16")
        others = (self.scale, self.masked, self.token_scale, self.windows, self.gate, self.zero != "none")
        if not self.experts or not plain or any(others):
            raise ShapeError(
                "matrices that are not packed are those of experts, of 16-bit floats of the activation type,"
                f" without scales, gate or counted slots; got {self.weight} x {self.activation}"
            )

    @property
    def columns(self) -> int:
        """Columns of the result."""
        if self.windows and self.windows.features:
            return self.windows.groups * self.windows.features
        return self.n // 2 if self.gate else self.n

    @property
    def accumulator(self) -> str:
        """Element type of the running sum: int32 for integer cores, else float32."""
        return "int32" if self.activation == "int8" else "float32"

    @property
    def groups(self) -> int:
        """Number of scale groups along K (the last one may be partial)."""
        return -(-self.k // self.group_size)

    @property
    def token_scale_shape(self) -> tuple[int, ...]:
        """Shape of the token scales of one row of A: ``()``, or ``(groups,)``."""
        return (-(-self.k // self.token_group),) if self.token_group else ()

    @property
    def extras(self) -> tuple[str, ...]:
        """Features beyond one product with row scales, which not every pipeline supports."""
        names = ("experts", "token_group", "windows", "residual", "factor", "gate")
        found = tuple(name for name in names if getattr(self, name))
        return (*found, self.stored) if self.stored else found

    @property
    def channels(self) -> int:
        """Channels of a window: of one group."""
        return self.k // self.windows.points if self.windows else self.k

    def shape_free(self) -> dict[str, Any]:
        """Return everything a shape-generic kernel depends on: not N, K, number of experts, invariance.

        ``group_size`` becomes 0 when one scale serves a whole row; ``experts`` says how they find
        their tokens, and is absent where there are none.
        """
        fields = asdict(self)
        for name in ("n", "k", "experts", "masked", "slots", "token_group", "power_scales"):
            del fields[name]
        for name in ("windows", "residual", "factor", "batch_invariant", "gate", "gate_last", "stored"):
            del fields[name]
        if self.stored:
            fields["stored"] = self.stored
        if self.gate:
            fields |= {"gate": self.gate, "gate_last": self.gate_last}
        if self.windows:
            fields["windows"] = asdict(self.windows)
        fields |= {name: True for name in ("residual", "factor") if getattr(self, name)}
        if self.power_scales:
            fields["power_scales"] = True
        if self.experts:
            fields["experts"] = "masked" if self.masked else "named" if self.slots else "contiguous"
        if self.token_group:
            fields["token_group"] = self.token_group
        fields["group_size"] = 0 if self.group_size >= self.k else self.group_size
        return fields
