"""The epilogue of a finished sum: scales, bias, unary operators, output type, store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.ir.ops import get_operator
from ladder.ir.scalars import kept
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.arguments import Arguments
from tile_types.errors import ScheduleError


def finish(gemm: Gemm, value: Expr, m: Expr, n: Expr, args: Arguments, added: Expr = None) -> Expr:
    """Return the output element of a float32 sum.

    gemm: Says which of the steps apply.
    value: float32 sum of row m of A and row n of the weight.
    m, n: Position in the output; both within bounds.
    args: The kernel's tensors.
    added: The element of the residual, where it was loaded before.
    """
    value = finish_float(gemm, value, m, n, args, added)
    return value if gemm.output == "float32" else T.Cast(gemm.output, value)


def finish_float(gemm: Gemm, value: Expr, m: Expr, n: Expr, args: Arguments, added: Expr = None) -> Expr:
    """Return the output element of a float32 sum, before it is rounded to the output type."""
    if args.row_scale is not None:
        value = value * args.row_scale[n]
    if args.factor is not None:
        value = value * args.factor[n]
    if args.token_scale is not None and not gemm.token_group:  # groups were scaled as they ended
        value = value * args.token_scale[m]
    if args.bias is not None:
        value = value + T.Cast("float32", args.bias[n])
    if args.residual is not None:
        value = value + T.Cast("float32", args.residual[m, n] if added is None else added)
    return activate(gemm, value)


def activate(gemm: Gemm, value: Expr) -> Expr:
    """Apply the unary operators that come last."""
    for name in gemm.epilogue:
        value = unary(name, kept(value))
    return value


def unary(name: str, value: Expr) -> Expr:
    """Apply a unary operator of the operator table to a float32 expression."""
    lower = get_operator(name).lower
    if lower is None:
        raise ScheduleError(f"{name!r} is not element-wise, so it cannot run in an epilogue")
    return lower(value)


def finish_gated(
    gemm: Gemm, args: tuple[Arguments, Arguments], sums: tuple[Any, Any], count: int, m: Expr, n: Expr
) -> None:
    """Finish and store ``count`` results of a gated product; see `finish_row`.

    args: The kernel's tensors as the rows of the first, and of the second half of the weight see them.
    sums: Local float32 buffers of ``count`` sums of both halves.
    """

    def gated(index: int, _: Expr) -> Expr:
        pair = [
            T.Cast("float32", finish(gemm, own[index], m, n + index, seen))
            for own, seen in zip(sums, args, strict=True)
        ]
        gate, other = pair[::-1] if gemm.gate_last else pair
        gate = T.Cast("float32", T.Cast(gemm.output, unary(gemm.gate, kept(gate))))
        return T.Cast(gemm.output, gate * other)

    store_row(gemm, args[0], gated, count, m, n)


def finish_row(gemm: Gemm, args: Arguments, sums: Any, count: int, m: Expr, n: Expr) -> None:
    """Finish and store ``count`` consecutive sums of row m from column n on.

    sums: Local float32 buffer of ``count`` sums.
    m, n: Row (within bounds) and first column, a multiple of ``count``.
    """

    def finished(index: int, added: Expr) -> Expr:
        return finish(gemm, sums[index], m, n + index, args, added)

    store_row(gemm, args, finished, count, m, n)


def store_row(
    gemm: Gemm, args: Arguments, result: Callable[[int, Expr], Expr], count: int, m: Expr, n: Expr
) -> None:
    """Store ``count`` results ``result(index, element of the residual)`` of row m from column n on.

    Columns beyond N are not written. The store is one vector where rows of the output
    start at multiples of its size.
    """
    dtype = gemm.output
    width = min(count, 16 // (4 if dtype == "float32" else 2))

    def vectors() -> None:
        results = b.local(count, dtype)
        added = load_run(args.residual, count, width, m, n)
        for index in range(count):
            b.store(results, result(index, None if added is None else added[index]), index)
        for first in range(0, count, width):
            with b.vector(width) as v:
                b.store(args.y, results[first + v], m, n + first + v)

    def scalars() -> None:
        for index in range(count):
            with b.when(n + index < args.n):
                b.store(args.y, result(index, None), m, n + index)

    b.either(T.And(args.n % count == 0, n + count <= args.n), vectors, scalars)


def load_run(tensor: Any, count: int, width: int, m: Expr, n: Expr) -> list[Expr] | None:
    """Load ``count`` elements of a row, ``width`` (16 bytes) at once; None if there is no tensor.

    Not plain reads: the compiler would move them ahead of the wait for the kernel before.
    """
    if tensor is None:
        return None
    dtype = str(tensor.dtype)
    words = b.local(4 * count // width, "uint32")
    for index in range(count // width):
        registers = [words[4 * index + i] for i in range(4)]
        b.ptx("ld.global.v4.u32", *registers, tensor.ptr_to([m, n + index * width]))
    if dtype == "float32":
        return [T.reinterpret("float32", words[i]) for i in range(count)]
    halves = [T.Cast("uint16", words[i // 2] >> T.uint32(16 * (i % 2))) for i in range(count)]
    return [T.reinterpret(dtype, half) for half in halves]
