"""The block graph of a product: a tile program without loops, generic in M, N and K."""

from __future__ import annotations

from ladder.ir.gemm import Gemm
from ladder.ir.program.model import AddGroup, Fill, Multiply, Operand, Statement, Store, Sum, TileProgram
from tile_types import get_type, representable
from tile_types.errors import ScheduleError
from tile_types.forms import byte_form
from tile_types.tile import Extent, Tile

WIDENINGS = {
    "int8": ("bfloat16",),
    "fp8_e4m3": ("bfloat16",),
    "fp8_e5m2": ("bfloat16",),
    "bfloat16": ("bfloat16",),
}
"""16-bit operand types that hold every value of an activation type."""


SUMMED = 128
"""Columns that are summed at a time where one scale serves a row and x may become digits, whose unit each
run of columns has of its own."""


def summed_columns(gemm: Gemm) -> int:
    """Return the columns of one sum: those that share a scale, or `SUMMED`; 0 if they are all of a row.

    It decides the packed layout, so it depends neither on K nor on the device.
    """
    if gemm.group_size < gemm.k:
        return gemm.group_size
    plain = not gemm.scale and gemm.zero == "none" and gemm.activation in ("float16", "bfloat16", "float32")
    return SUMMED if plain and byte_form(get_type(gemm.weight)) else 0


def operand_type(gemm: Gemm) -> str:
    """Return the narrowest type that holds activations and weights: int8, bfloat16 or float32.

    It decides the packed layout, so it depends on the problem alone, never on the device.
    """
    weight = get_type(gemm.weight)
    if gemm.activation == "int8" and weight.elem_bits <= 8 and weight.is_integer:
        return "int8"
    for operand in WIDENINGS.get(gemm.activation, ()):
        if representable(weight, operand):
            return operand
    return "float32"


def block_graph(gemm: Gemm) -> TileProgram:
    """Return what one product computes: groups of K are summed, scaled and added, then stored.

    gemm: The problem; only its ``shape_free()`` part matters.
    Raises ScheduleError if the problem has more to it than tile programs say today.
    """
    if gemm.extras:
        raise ScheduleError(f"tile programs do not say {', '.join(gemm.extras)}")
    columns = summed_columns(gemm)
    count: Extent = "G" if columns else 1
    group: Extent = columns or "K"
    axes: tuple[tuple[str, Extent], ...] = (("m", "M"), ("n", "N"), ("g", count), ("k", group))
    exact = "int32" if operand_type(gemm) == "int8" else "float32"

    def operand(name: str, letters: str, ttype: str) -> Operand:
        shape = tuple(dict(axes)[axis] for axis in letters)
        return Operand(name, tuple(letters), Tile(get_type(ttype), shape))

    zero = exact if gemm.zero == "integer" else "float32"
    arguments = {
        "x": operand("x", "mgk", gemm.activation),
        "w": operand("w", "ngk", gemm.weight),
        "scale": operand("scale", "gn", "float32") if gemm.scale else None,
        "zero": operand("zero", "gn", zero) if gemm.zero != "none" else None,
        "row_scale": operand("row_scale", "n", "float32"),
        "token_scale": operand("token_scale", "m", "float32") if gemm.token_scale else None,
        "bias": operand("bias", "n", gemm.output) if gemm.bias else None,
        "y": operand("y", "mn", gemm.output),
    }
    present = {name: argument for name, argument in arguments.items() if argument is not None}
    steps = (("mul", "row_scale"), ("mul", "token_scale"), ("add", "bias"))
    operators = [step for step in steps if step[1] in present] + [(name, "") for name in gemm.epilogue]
    sums = Sum(operand("x.sum", "mg", exact), "x", "k")
    body: tuple[Statement, ...] = (
        Fill(operand("total", "mn", "float32")),
        Fill(operand("acc", "gmn", exact)),
        Multiply("acc", "x", "w"),
        AddGroup(
            "total",
            "acc",
            "x.sum" if "zero" in present else "",
            "zero" if "zero" in present else "",
            "scale" if "scale" in present else "",
        ),
        Store("y", "total", tuple(operators)),
    )
    body = (sums, *body) if "zero" in present else body
    return TileProgram("product", axes, tuple(present.values()), body)
