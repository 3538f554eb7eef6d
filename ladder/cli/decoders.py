"""How GPUs decode a type: the proven recipe of each activation type, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ladder.api.problem import operands_of
from ladder.cli.problem import type_named
from ladder.cli.tables import activations
from ladder.ir.gemm import Gemm
from ladder.lower.gpu.decode import Decoder, make_decoder
from ladder.lower.gpu.proven import table_sizes
from ladder.lower.rocm.decode import vector_instructions, wave_decoder
from schedules.codes import table_bytes
from schedules.cost_amd import VECTOR_LANES
from schedules.layouts import LANES
from targets import TileDevice, get_device
from tile_types import TType, representable
from tile_types.errors import UnknownNameError
from tile_types.multiples import held_multiple

COLUMNS = (
    "activation", "kernels", "order of bits", "recipe", "instructions a weight", "clocks a tile", "table",
)  # fmt: skip

NONE = (
    "No activation type of GPUs holds its values exactly, so no kernel of theirs decodes it (CPUs may"
    " multiply float32); TType(..., exact=False) lets a kernel round them."
)
"""What is said of a type without decoders."""

CODES = 32
"""Weights of a thread in a packed tile."""


def decoder_rows(name: str, target: str) -> list[dict[str, Any]]:
    """Return one JSON-able object per activation type and kind of kernel.

    name: A type of the library, or ``python:module:name`` of a `TType`.
    target: A GPU.
    Raises UnknownNameError if the target is no GPU.
    Raises ParseError if the name after ``python:`` is no type of up to 8 bits.
    """
    device = get_device(target)
    if not device.is_gpu:
        raise UnknownNameError(
            f"{device.name} is no GPU and decodes by tables of pairs in its cache: name one as --target"
        )
    ttype = type_named(name).element_type
    return [row for core in activations(device) if core in LANES for row in _rows(ttype, core, device)]


def _rows(ttype: TType, core: str, device: TileDevice) -> Iterator[dict[str, Any]]:
    ttype = held_multiple(ttype, operands_of(core))
    if not representable(ttype, core) or ttype.elem_bits > LANES[core]:
        return
    gemm = Gemm(64, 64, ttype.name, core)
    found: dict[tuple[str, int], tuple[list[str], Decoder]] = {}
    for users, decoder in _decoders(gemm, device):
        found.setdefault((decoder.choice.strategy, decoder.table_words), ([], decoder))[0].append(users)
    for kernels, decoder in found.values():
        instructions, clocks = _cost(decoder, device)
        yield {
            "activation": core,
            "kernels": kernels,
            "order": decoder.conversion.order,
            "recipe": decoder.choice.strategy,
            "instructions": instructions,
            "instructions_per_weight": instructions / CODES,
            "clocks": clocks,
            "table_bytes": 4 * decoder.table_words,
        }


def _cost(decoder: Decoder, device: TileDevice) -> tuple[int, dict[str, float]]:
    """Return the instructions of a thread's share of a tile, and the clocks of each pipe of a scheduler."""
    if device.vendor == "amd":
        count = vector_instructions(decoder.choice.recipe, decoder.conversion)
        return count, {"vector": count * device.warp * device.schedulers / VECTOR_LANES}
    cost = decoder.choice.cost
    return cost.instructions, {"alu": cost.alu, "fma": cost.fma, "shared": cost.shared}


def _decoders(gemm: Gemm, device: TileDevice) -> Iterator[tuple[str, Decoder]]:
    """Yield the decoders of kernels that stream words to registers, and of those that stage them."""
    if device.compute_capability < (1, 0):
        yield "all", wave_decoder(gemm, device)
        return
    least = table_bytes(gemm)
    for room in table_sizes(gemm):
        if room >= least:
            yield "few rows of x", make_decoder(gemm, device, gains=True, table=room)
    yield "many rows of x", make_decoder(gemm, device, gains=True, table=least)


def cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of `COLUMNS`."""
    return [
        (
            row["activation"],
            ", ".join(dict.fromkeys(row["kernels"])),
            row["order"],
            row["recipe"],
            f"{row['instructions_per_weight']:.2f}",
            ", ".join(f"{pipe} {clocks:g}" for pipe, clocks in row["clocks"].items() if clocks),
            f"{row['table_bytes'] // 1024} KiB" if row["table_bytes"] else "none",
        )
        for row in rows
    ]
