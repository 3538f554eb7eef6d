"""Proven recipes: the ways to decode a type that passed their proof, and the cheapest of them.

`STRATEGIES` propose recipes from the values of the type alone; of the recipes that `proof.prove`
accepts, the cheapest (`machine.Cost`) is used. So a new type needs no entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ladder.ir.gemm import Gemm
from ladder.lower.gpu.decode_codebook import Table, propose_lookup, propose_table
from ladder.lower.gpu.decode_float import (
    propose_raw_wired,
    propose_spread,
    propose_through_bfloat,
    propose_wired,
    propose_xor,
    unscaled,
)
from ladder.lower.gpu.decode_int import (
    propose_bytes,
    propose_magic,
    propose_placed,
    propose_signed,
    propose_split_magic,
)
from ladder.lower.gpu.machine import Cost, CountingMachine, Machine
from ladder.lower.gpu.proof import prove
from ladder.lower.gpu.recipes import (
    PLAIN,
    Conversion,
    Meaning,
    Recipe,
    lane_recipes,
    propose_pass_through,
    propose_reference,
)
from schedules.codes import LARGEST_GAIN, held_type, order_read
from schedules.fragments import FragmentLayout
from schedules.layouts import SIGN_PLACES, SPREAD, lane_of, orders
from schedules.spread import XOR_PACKINGS
from targets import TileDevice
from tile_types import TType, get_type, representable, require_representable
from tile_types.errors import ConversionError, VerificationError

LANES = ("lanes", "dense")

BY_LANE = (*LANES, "bytes", *SIGN_PLACES)


@dataclass(frozen=True)
class Strategy:
    """A way to decode.

    propose: Yields recipes; of ``raw`` numbers, which not every kernel takes, each with what they mean.
    orders: Orders of packed bits that it reads.
    capability: Least compute capability, where not every device with the operand type can run it.
    """

    propose: Callable[[Conversion], Iterator[Any]]
    orders: tuple[str, ...] = LANES
    raw: bool = False
    capability: tuple[int, int] = (0, 0)


STRATEGIES: Mapping[str, Strategy] = {
    "placed": Strategy(propose_placed, raw=True),
    "wired, unscaled": Strategy(propose_raw_wired, BY_LANE, raw=True),
    "xor, unscaled": Strategy(partial(unscaled, propose_xor), tuple(XOR_PACKINGS), raw=True),
    "spread, unscaled": Strategy(partial(unscaled, propose_spread), tuple(SPREAD), raw=True),
    "signed": Strategy(propose_signed, raw=True),
    "pass-through": Strategy(propose_pass_through, ("lanes",)),
    "magic": Strategy(partial(lane_recipes, propose_magic), BY_LANE),
    "split magic": Strategy(partial(lane_recipes, propose_split_magic)),
    "wired": Strategy(partial(lane_recipes, propose_wired), BY_LANE),
    "xor": Strategy(propose_xor, tuple(XOR_PACKINGS)),
    "spread": Strategy(propose_spread, tuple(SPREAD)),
    "through bfloat16": Strategy(partial(lane_recipes, propose_through_bfloat), BY_LANE, capability=(8, 0)),
    "bytes": Strategy(propose_bytes),
    "lookup": Strategy(propose_lookup, (*LANES, "pairs")),
    "table": Strategy(propose_table, (*LANES, "bytes", "pairs")),
    "reference": Strategy(propose_reference, BY_LANE),
}
"""Ways to decode; of equally cheap ones the first is used."""

OFFSET_CLOCKS = 4.0
"""Clocks per tile that an offset costs a kernel which sums x once for all rows."""

FP8_OPERANDS = ("fp8_e4m3", "fp8_e5m2")
"""fp8 tensor cores take operands of two different fp8 types."""


@dataclass(frozen=True)
class Proven:
    """A recipe that passed its proof.

    strategy: Its row in `STRATEGIES`.
    cost: Cost of all operand registers of a thread's share of a tile, without scales.
    """

    strategy: str
    recipe: Recipe
    meaning: Meaning
    cost: Cost

    @property
    def capability(self) -> tuple[int, int]:
        """Least compute capability that runs it; (0, 0): every device with the operand type does."""
        return STRATEGIES[self.strategy].capability if self.strategy in STRATEGIES else (0, 0)

    @property
    def in_range(self) -> bool:
        """Whether products with its raw numbers stay within float32's normal ones."""
        return max(map(abs, self.meaning.gains)) <= LARGEST_GAIN

    def weight(self, offset_clocks: float = OFFSET_CLOCKS) -> float:
        """Return what recipes are ranked by; an offset is taken from sums, which costs something too."""
        return self.cost.weight + (offset_clocks if any(self.meaning.offsets) else 0.0)


PROVEN_FOR = ("operand", "zero", "raw", "order")
"""Key of a conversion's proofs beside its type."""

_proven: dict[tuple[Any, ...], list[Proven]] = {}

_decodable: dict[tuple[Any, ...], bool] = {}


def proof_key(conversion: Conversion) -> tuple[Any, ...]:
    """Return what proofs of a conversion depend on: the type by its values, not by its name alone."""
    ttype = conversion.ttype
    values = ttype.probe_values().tobytes()
    return (ttype.name, ttype.elem_bits, values, *(getattr(conversion, x) for x in PROVEN_FOR))


def proven_recipes(conversion: Conversion) -> list[Proven]:
    """Return every recipe that is proven for a conversion, cheapest first.

    Raises VerificationError if no recipe passes.
    """
    key = proof_key(conversion)
    if key not in _proven:
        _proven[key] = _prove_all(conversion)
    return _proven[key]


def _proposals(conversion: Conversion) -> Iterator[tuple[str, Recipe, Meaning]]:
    for name, strategy in STRATEGIES.items():
        if conversion.order not in strategy.orders or (strategy.raw and not conversion.raw):
            continue
        for found in strategy.propose(conversion):
            yield (name, *found) if strategy.raw else (name, found, PLAIN)


def _prove_all(conversion: Conversion) -> list[Proven]:
    found: list[Proven] = []
    failures: list[str] = []
    for strategy, recipe, meaning in _proposals(conversion):
        if strategy == "reference" and any(map(_runs_anywhere, found)):
            break
        try:
            prove(recipe, conversion, meaning)
        except VerificationError as error:
            failures.append(f"{strategy}: {error}")
            continue
        found.append(Proven(strategy, recipe, meaning, count(recipe, conversion)))
    if not found:
        raise VerificationError(
            f"no decode of {conversion.ttype.name} to {conversion.operand} passes its proof: "
            + "; ".join(failures)
        )
    return sorted(found, key=Proven.weight)


def _runs_anywhere(proven: Proven) -> bool:
    """Tell whether a recipe serves any kernel: it needs neither a device's instructions nor a table."""
    return proven.in_range and not any(proven.capability) and not table_bytes(proven.recipe)


def cheapest(
    conversion: Conversion, capability: tuple[int, int], table: int = 0, offset_clocks: float = OFFSET_CLOCKS
) -> Proven:
    """Return the cheapest proven recipe that a compute capability can run.

    table: Bytes of shared memory that the kernel has for a table.
    offset_clocks: Clocks per tile that an offset costs the kernel.
    """
    found = [x for x in proven_recipes(conversion) if x.in_range and usable(x, capability, table)]
    return min(found, key=lambda x: x.weight(offset_clocks))


def usable(proven: Proven, capability: tuple[int, int], table: int) -> bool:
    """Tell whether a compute capability runs a recipe, with ``table`` bytes for its table."""
    return capability >= proven.capability and table_bytes(proven.recipe) <= table


def table_bytes(recipe: Recipe) -> int:
    """Return the shared memory that a recipe's table takes."""
    return recipe.bytes if isinstance(recipe, Table) else 0


def table_sizes(gemm: Gemm) -> list[int]:
    """Return the bytes of shared memory that tables of a problem's decoders take, largest first."""
    element = held_type(gemm.weight)
    order = packed_order(element, gemm.activation)
    found = proven_recipes(Conversion(element, operand_type(gemm), order=order))
    sizes = {table_bytes(proven.recipe) for proven in found if proven.strategy != "reference"}
    return sorted(sizes or {0}, reverse=True)


def packed_order(ttype: TType, core: str, device: TileDevice | None = None) -> str:
    """Return the order of packed bits in which a type decodes cheapest for activations of type ``core``.

    device: The GPU, which may have conversions of its own; None: one without.
    """
    own = "" if device is None else order_read(ttype, core, device)
    if own:
        return own
    found = orders(ttype.elem_bits, lane_of(core))
    if len(found) == 1:
        return found[0]
    operand = _operand(ttype, core, "none")
    conversions = [Conversion(ttype, operand, raw=True, order=order) for order in found]
    return min(filter(is_decodable, conversions), key=lambda x: proven_recipes(x)[0].weight()).order


def is_decodable(conversion: Conversion) -> bool:
    """Tell whether any recipe reads a type in an order."""
    key = proof_key(conversion)
    if key not in _decodable:
        _decodable[key] = any(True for _ in _proposals(conversion))
    return _decodable[key]


def packed_layout(ttype: TType, core: str, device: TileDevice | None = None) -> FragmentLayout:
    """Return the layout of a type's packed codes for activations of type ``core``; see `packed_order`."""
    return FragmentLayout(ttype.elem_bits, lane_of(core), packed_order(ttype, core, device))


def count(recipe: Recipe, conversion: Conversion) -> Cost:
    """Return the cost of decoding a thread's share of a tile (32 codes)."""
    m = CountingMachine()
    decode_all(recipe, conversion, m)
    return m.cost


def decode_all(recipe: Recipe, conversion: Conversion, m: Machine) -> None:
    """Decode a thread's share of a tile on a machine that looks at no values."""
    words = [m.input(None) for _ in range(conversion.bits)]
    zero = m.input(None) if conversion.zero == "integer" else None
    for register in range(conversion.lane):
        recipe.register(m, words, register, zero)


def operand_type(gemm: Gemm) -> str:
    """Return the operand type that weights are decoded to: that of the activations.

    Tensor cores take two different fp8 types, so the other one serves if only it fits.

    Raises ConversionError if the type does not fit without loss (names a core that does), or if real zero
        points meet an 8-bit core.
    """
    if gemm.zero == "float" and lane_of(gemm.activation) == 8:
        raise ConversionError(
            f"real zero points cannot be subtracted on the 8-bit core {gemm.activation};"
            " use float16 or bfloat16"
        )
    return _operand(get_type(gemm.weight), gemm.activation, gemm.zero)


def _operand(ttype: TType, core: str, zero: str) -> str:
    """Return what a type is decoded to."""
    if core in FP8_OPERANDS:
        for operand in (core, *FP8_OPERANDS):
            if representable(ttype, operand, zero):
                return operand
    require_representable(ttype, core, zero)
    return core
