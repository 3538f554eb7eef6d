"""A compiled operator: loaded entries, which of them serves which M, and the call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

from ladder.ir.extents import MOST_COUNTED
from ladder.ir.gemm import Gemm
from ladder.runtime.allocate import Allocate, allocator, viewer
from ladder.runtime.packed import PackedWeight, as_taken, layout_of, refuse_layout
from ladder.runtime.recording import loads_into_gpu
from ladder.runtime.threads import keep_apart
from tile_types.arrays import torch_dtype
from tile_types.errors import DeviceError, DTypeError, ShapeError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16
"""Bytes: kernels read rows of x in vectors of this size."""

FEW_ROWS = 65
"""M below which a bound call finds its kernel without a search."""

Call = Callable[..., "torch.Tensor"]
"""``(x, bias=None, token_scale=None)`` -> y, for one operator and one weight."""


def strided() -> torch.layout:
    """Return torch's layout of dense tensors."""
    import torch

    return torch.strided


def rows_at_once(columns: int) -> int:
    """Return how many rows a launch takes at most: kernels would not count the elements of more."""
    return max(MOST_COUNTED // columns & -ALIGNMENT, ALIGNMENT)


class Later:
    """A kernel that the first call which needs it finds or builds; what is found takes its place.

    find: Finds or builds the kernel, and loads it.
    """

    def __init__(self, find: Callable[[], Any]) -> None:
        self.find = find
        self.places: list[list[Any]] = []
        """Lists that hold it."""

    def __call__(self, *arguments: Any) -> None:
        """Call the kernel; raises CompilerError, MissingToolError if it must be built and cannot."""
        entry = self.find()
        with loads_into_gpu():
            entry(*arguments)
        for entries in self.places:
            entries[:] = [entry if held is self else held for held in entries]


class CompiledGemm:
    """``y = epilogue(x · decode(weight)ᵀ + bias)`` for any M, on one kind of device.

    A call launches one kernel on the current stream and never synchronises.

    gemm: The problem.
    family: ``"cuda"`` or ``"cpu"``: torch's device type as well.
    limits: Largest M of each entry, ascending; the last serves every larger M too.
    entries: Callables ``(x, *packed, token_scale?, bias?, y)``, one per limit; some may be `Later`.
    order: `ladder.runtime.packed.own_order` of the device.
    """

    def __init__(
        self,
        gemm: Gemm,
        family: str,
        limits: Sequence[int],
        entries: Sequence[Any],
        order: str = "",
    ) -> None:
        self.gemm = gemm
        self.family = family
        self.layout = layout_of(gemm, family, order)
        self.limits = list(limits)
        self.entries = list(entries)
        self.dtype = torch_dtype(gemm.activation)
        self.output = torch_dtype(gemm.output)
        self.pad = -gemm.k % (ALIGNMENT // self.dtype.itemsize)
        # A call reads these once each: every look-up counts against its few microseconds.
        self._on_cpu = family == "cpu"
        self._n, self._k = gemm.columns, gemm.k
        self._view, self._strided = viewer(), strided()
        self._bounds = self.limits[:-1]  # the last entry serves every larger M
        self._few = [self.entry_for(m) for m in range(FEW_ROWS)]
        for later in {entry for entry in self.entries if isinstance(entry, Later)}:
            later.places += [self.entries, self._few]
        self._extras = gemm.token_scale or gemm.bias
        self._most = rows_at_once(max(self._n, self._k))

    def entry_for(self, m: int) -> Any:
        """Return the kernel that serves M = ``m``."""
        return self.entries[bisect_left(self._bounds, m)]

    def __call__(
        self,
        x: torch.Tensor,
        packed: PackedWeight,
        bias: torch.Tensor | None = None,
        token_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply.

        x: ``[..., K]`` of the activation type, on the device of ``packed``.
        packed: What `ladder.runtime.packed.pack` made for the same problem.
        bias: ``[N]`` of the output type, if the operator has a bias.
        token_scale: float32 ``[...]``, one per row of x, if the operator has token scales.
        Returns: ``[..., N]`` of the output type.
        Raises ShapeError, DTypeError, DeviceError if an argument does not fit; the message says which and
            what fits.
        """
        return self.bind(packed)(x, bias, token_scale)

    def run(
        self,
        x: torch.Tensor,
        weight: Sequence[torch.Tensor],
        bias: torch.Tensor | None = None,
        token_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply by the bare tensors of a packed weight; see `__call__`."""
        where, weight = weight[0].device, [*map(as_taken, weight)]
        return self._launch(x, weight, where, allocator(where), bias, token_scale)

    def into(
        self,
        rows: torch.Tensor,
        weight: Sequence[Any],
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        token_scale: torch.Tensor | None = None,
    ) -> None:
        """Multiply a matrix ``rows[M, K]`` by bare tensors of a packed weight into ``out[M, N]``."""
        m = rows.shape[0]
        if not m:
            return
        if self.pad or not rows.is_contiguous() or rows.data_ptr() % ALIGNMENT:
            rows = self.aligned(rows)
        if self._on_cpu:
            keep_apart()
        extras = self._extra_arguments(m, rows, bias, token_scale) if self._extras else ()
        self._multiply(rows, weight, extras, out)

    def _multiply(
        self,
        rows: torch.Tensor,
        weight: Sequence[Any],
        extras: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Call the kernel for so many rows; for each part of them where it would not count all elements."""
        m = rows.shape[0]
        if m <= self._most:
            self.entries[bisect_left(self._bounds, m)](rows, *weight, *extras, out)
            return
        for begin in range(0, m, self._most):
            part = slice(begin, begin + self._most)
            own = [x[part] if not at and self.gemm.token_scale else x for at, x in enumerate(extras)]
            self._multiply(rows[part], weight, own, out[part])

    def bind(self, packed: PackedWeight) -> Call:
        """Return ``(x, bias, token_scale) -> y`` for one weight; what never changes is looked up once.

        Raises ShapeError if the weight was packed for another operator.
        """
        found = packed.calls.get(self)
        if found is None:
            if packed.layout != self.layout:
                refuse_layout(packed.layout, self.layout)
            found = packed.calls[self] = self._bound(packed.foreign, packed.device)
        return found

    def _bound(self, weight: Sequence[Any], where: torch.device) -> Call:
        """Return the call for a matrix, or a batch of them, that fits as it is; else it takes `_launch`."""
        n, k, output, view, launch = self._n, self._k, self.output, self._view, self._launch
        most = self._most
        entries, bounds, few, allocate = self.entries, self._bounds, self._few, allocator(where)
        plain = not (self.pad or self._extras or self._on_cpu)
        x_strides, y_strides = (k, 1), (n, 1)

        def call(
            x: torch.Tensor, bias: torch.Tensor | None = None, token_scale: torch.Tensor | None = None
        ) -> torch.Tensor:
            if plain and bias is None and token_scale is None and not x.is_neg():
                try:  # the kernel's entry looks at types, strides and devices; `launch` says what is wrong
                    shape = x.shape  # raises for nested tensors, as data_ptr for sparse ones
                    aligned = not x.data_ptr() % ALIGNMENT
                    if aligned and len(shape) == 2 and shape[1] == k and 0 < (m := shape[0]) <= most:
                        y = allocate((m, n), y_strides, output)
                        (few[m] if m < FEW_ROWS else entries[bisect_left(bounds, m)])(x, *weight, y)
                        return y
                    flat = aligned and len(shape) == 3 and shape[2] == k and x.is_contiguous()
                    if flat and 0 < (m := x.numel() // k) <= most:
                        y = allocate((shape[0], shape[1], n), (shape[1] * n, n, 1), output)
                        rows, out = view(x, (m, k), x_strides, 0), view(y, (m, n), y_strides, 0)
                        (few[m] if m < FEW_ROWS else entries[bisect_left(bounds, m)])(rows, *weight, out)
                        return y
                except (TypeError, ValueError, BufferError, RuntimeError):
                    pass
            return launch(x, weight, where, allocate, bias, token_scale)

        return call

    def _launch(
        self,
        x: torch.Tensor,
        weight: Sequence[Any],
        where: torch.device,
        allocate: Allocate,
        bias: torch.Tensor | None,
        token_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """Check x, allocate the result and call the kernel for this M."""
        if x.layout is not self._strided or x.is_nested:
            refuse_sparse(x)
        x = in_memory(x)
        shape, n = x.shape, self._n
        if x.dtype is not self.dtype or not shape or shape[-1] != self._k or x.device != where:
            self._reject(x, where)
        if len(shape) == 2:
            rows, m = x, shape[0]
            y = out = allocate((m, n), (n, 1), self.output)
        else:
            rows = x.reshape(-1, self._k)
            m = rows.shape[0]
            steps = (n * prod(shape[axis + 1 : -1]) for axis in range(len(shape) - 1))
            y = allocate((*shape[:-1], n), (*steps, 1), self.output)  # no view: autograd forbids writing it
            out = y.view(m, n)
        if m:
            if self.pad or not rows.is_contiguous() or rows.data_ptr() % ALIGNMENT:
                rows = self.aligned(rows)
            if self._on_cpu:
                keep_apart()
            more = self._extras or bias is not None or token_scale is not None
            self._multiply(rows, weight, self._extra_arguments(m, x, bias, token_scale) if more else (), out)
        return y

    def aligned(self, matrix: torch.Tensor) -> torch.Tensor:
        """Copy to rows that start at multiples of 16 bytes, zero beyond K."""
        import torch

        if self.pad:
            # One-byte floats have no pad of their own: the bits are padded instead.
            bits = matrix.view(torch.int8) if matrix.dtype.itemsize == 1 else matrix
            return torch.nn.functional.pad(bits, (0, self.pad)).view(matrix.dtype)
        return matrix.clone(memory_format=torch.contiguous_format)

    def _extra_arguments(
        self, m: int, x: torch.Tensor, bias: torch.Tensor | None, token_scale: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Check the per-row and per-column vectors and return those that the kernel takes."""
        import torch

        extras = []
        token_shape = (m, *self.gemm.token_scale_shape)
        for name, wanted, vector, shape, dtype in (
            ("token_scale", self.gemm.token_scale, token_scale, token_shape, torch.float32),
            ("bias", self.gemm.bias, bias, (self.gemm.n,), self.output),
        ):
            require_alike(name, wanted, vector)
            if vector is None:
                continue
            if vector.numel() != prod(shape):
                raise ShapeError(f"{name} must have {prod(shape)} elements, got shape {tuple(vector.shape)}")
            if vector.dtype != dtype:
                raise DTypeError(f"{name} must be {dtype}, got {vector.dtype}; convert it with .to({dtype})")
            require_beside(name, vector, x)
            # Spare three trips through the dispatcher.
            vector = in_memory(vector)
            plain = vector.shape == shape and vector.is_contiguous()
            extras.append(vector if plain else vector.reshape(shape).contiguous())
        return extras

    def _reject(self, x: torch.Tensor, where: torch.device) -> NoReturn:
        """Raise the error that says what is wrong with x."""
        refuse_rows(x, self.dtype, self.gemm.k)
        if x.device.type != self.family:
            raise DeviceError(
                f"x is on {x.device}, the operator was built for {self.family!r} devices;"
                " move x, or build the operator for that target"
            )
        raise DeviceError(f"x is on {x.device}, the packed weight on {where}; move one with .to()")


def refuse_rows(x: torch.Tensor, dtype: torch.dtype, width: int) -> None:
    """Raise DTypeError or ShapeError unless x has rows of a width, of a type."""
    if x.dtype != dtype:
        raise DTypeError(
            f"x is {x.dtype}, the operator was built for {dtype}; convert x with .to({dtype})"
            " or build the operator with another activation type"
        )
    if not x.shape:
        raise ShapeError(f"x must have at least one axis [..., K={width}], got a scalar")
    if x.shape[-1] != width:
        raise ShapeError(
            f"the last axis of x has {x.shape[-1]} elements, the weight has K={width} (x is {tuple(x.shape)})"
        )


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy where memory, which kernels read as it lies, holds other values or is absent."""
    if x.is_neg():
        return x.resolve_neg()
    return x.clone() if x._is_zerotensor() else x


def refuse_sparse(x: torch.Tensor) -> NoReturn:
    """Raise the error for a tensor of another layout than strided, or a nested one."""
    raise DTypeError(
        f"x is {'nested' if x.is_nested else x.layout}, kernels read rows of dense tensors; give x.to_dense()"
    )


def require_alike(name: str, wanted: bool, tensor: torch.Tensor | None) -> None:
    """Raise ShapeError unless an operand is given just where the operator was built with it."""
    if wanted != (tensor is not None):
        verb = "needs" if wanted else "was built without"
        raise ShapeError(f"the operator {verb} {name}; build it and call it alike")


def require_beside(name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    """Raise DeviceError unless an operand is on x's device."""
    if tensor.device != x.device:
        raise DeviceError(f"{name} is on {tensor.device}, x is on {x.device}; move one with .to()")
