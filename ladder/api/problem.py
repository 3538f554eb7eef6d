"""From what users say (type names, group size) to the normal form of the problem."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.ir.gemm import ACTIVATIONS, Gemm, has_power_scales
from ladder.ir.ops import unary_operators
from ladder.ir.scaled import FORMATS
from ladder.ir.windows import Windows
from ladder.runtime.tokens import EIGHT_BIT
from tile_types import TType, get_type, representable, require_representable
from tile_types.errors import (
    ConversionError,
    DTypeError,
    ShapeError,
    positive_number,
    require_kind,
    sequence_of,
    unknown_name,
    whole_number,
)
from tile_types.multiples import held_multiple
from tile_types.quantize import is_whole_row

DEFAULT_OUTPUT = {"int8": "float32", "fp8_e4m3": "float16", "fp8_e5m2": "float16"}
"""Result types of 8-bit activations; all others give their own type."""

FP8 = ("fp8_e4m3", "fp8_e5m2")
"""Tensor cores multiply either with either, so a weight may decode to the other one."""


def gemm_for(
    n: int,
    k: int,
    weight: str | TType,
    activation: str,
    *,
    output: str | None = None,
    group_size: int | None = None,
    zero: str | None = None,
    bias: bool = False,
    epilogue: Sequence[str] = (),
    token_scale: bool | None = None,
    token_group: int | None = None,
    windows: Windows | None = None,
    residual: bool = False,
    batch_invariant: bool = False,
) -> Gemm:
    """Return the normal form of a quantized matrix product.

    `Gemm` describes the parameters; None takes the default of the types.

    weight: Type or its name; a block type (``"mxfp4"``, ``"int4_g128"``) brings its group size and zero
        points.
    group_size: Elements along K per scale; None or -1 is one per row, or the block type's own.
    output, token_scale: By default the activation's type (float32 for int8, float16 for fp8); true for 8-bit
        activations.
    Raises UnknownNameError, ConversionError, ShapeError if a type or operator does not exist, if the
        activation type cannot hold the weights unchanged, if the group size contradicts the type or is none.
        The text names what would do.
    """
    n, k, ttype = whole_number(n, "N"), whole_number(k, "K"), get_type(weight)
    activation = _known_activation(activation)
    kind = ttype.zero_kind if zero is None else zero
    held = held_multiple(ttype, operands_of(activation), kind)
    require_fits(held, activation, kind)
    _require_operators(epilogue)
    group = _group(ttype, group_size, k)
    _require_flags(bias=bias, token_scale=token_scale or False, batch_invariant=batch_invariant)
    return Gemm(
        n=n,
        k=k,
        weight=held.name,
        activation=activation,
        output=DEFAULT_OUTPUT.get(activation, activation) if output is None else output,
        group_size=group,
        scale=group < k,
        power_scales=group < k and has_power_scales(ttype),
        zero=kind,
        token_scale=activation in EIGHT_BIT if token_scale is None else token_scale,
        bias=bias,
        epilogue=tuple(epilogue),
        token_group=0 if token_group is None or token_group >= k else token_group,
        windows=windows,
        residual=residual,
        batch_invariant=batch_invariant,
    )


def _known_activation(name: str) -> str:
    if isinstance(name, str) and name in FORMATS:
        raise ConversionError(
            f"activations of type {name} are for `Matmul`, `Linear.from_linear`, `Linear.from_quantized` and"
            " `quantize_` alone"
        )
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise unknown_name("activation type", name, ACTIVATIONS)
    return name


def require_fits(ttype: TType, activation: str, zero: str) -> None:
    """Raise unless a core that takes these activations holds every weight."""
    if not any(representable(ttype, operand, zero) for operand in operands_of(activation)):
        require_representable(ttype, activation, zero)


def operands_of(activation: str) -> tuple[str, ...]:
    """Return the types that cores take as weights beside these activations."""
    return FP8 if activation in FP8 else (activation,)


def _require_flags(**flags: object) -> None:
    """Raise DTypeError for an option that says yes or no and was given something else, such as a tensor."""
    for name, value in flags.items():
        require_kind(value, bool, f"{name} must be True or False")


def _require_operators(epilogue: Sequence[str]) -> None:
    if isinstance(epilogue, str):
        raise DTypeError(f"epilogue must be a sequence of names, got {epilogue!r}; write ({epilogue!r},)")
    if not sequence_of(str, epilogue, "epilogue must be a sequence of names"):
        return
    for name in epilogue:
        if name not in unary_operators():
            raise unknown_name("element-wise operator", name, unary_operators())


def _group(ttype: TType, group_size: int | None, k: int) -> int:
    """Return the elements along K that share a scale, at most K."""
    if ttype.is_block:
        own = ttype.shape[-1]
        if not is_whole_row(group_size) and whole_number(group_size, "group_size") != own:
            raise ShapeError(
                f"{ttype.name} has blocks of {own} elements, group_size {group_size} contradicts it"
            )
        return min(own, k)
    if is_whole_row(group_size):
        return k
    return min(positive_number(group_size, "group_size", "-1 for one scale per row"), k)
