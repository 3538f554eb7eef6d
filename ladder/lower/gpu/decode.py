"""Decoders: from packed words to tensor-core operand registers, each proven before use.

`STRATEGIES` propose recipes from the values of the type alone; of the recipes that `proof.prove`
accepts, the cheapest (`machine.Cost`) is used. So a new type needs no entry here.

Where scales multiply accumulators, registers may hold *raw* numbers, and the accumulator applies
what is left: ``scale * (gain * sum(raw * x) + (offset - zero) * sum(x))``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.gpu.decode_codebook import propose_lookup
from ladder.lower.gpu.decode_float import (
    propose_crossed,
    propose_raw_crossed,
    propose_raw_spread,
    propose_raw_wired,
    propose_spread,
    propose_through_bfloat,
    propose_wired,
)
from ladder.lower.gpu.decode_int import propose_bytes, propose_magic, propose_split_magic
from ladder.lower.gpu.decode_raw import propose_placed
from ladder.lower.gpu.decode_signed import propose_signed
from ladder.lower.gpu.decode_table import Table, propose_table
from ladder.lower.gpu.emission import SharedTable, TirMachine, fill_table
from ladder.lower.gpu.machine import XOR, Cost, CountingMachine, Machine, Word
from ladder.lower.gpu.proof import prove
from ladder.lower.gpu.recipes import (
    PLAIN,
    Conversion,
    Meaning,
    Recipe,
    propose_pass_through,
    propose_reference,
)
from ladder.lower.gpu.scales import Fold, exponent_byte, fold, power_of, times
from schedules.codes import LARGEST_GAIN
from schedules.crossed import CROSSED
from schedules.layouts import SIGN_PLACES, SPREAD, THREADS, FragmentLayout, lane_of, orders, planes
from targets import TileDevice
from tile_types import TType, get_type, representable, require_representable
from tile_types.errors import ConversionError, VerificationError

Expr = Any
Propose = Callable[[Conversion], Iterator[Recipe]]
ProposeRaw = Callable[[Conversion], Iterator[tuple[Recipe, Meaning]]]

STRATEGIES: dict[str, Propose] = {
    "pass-through": propose_pass_through,
    "magic": propose_magic,
    "split magic": propose_split_magic,
    "wired": propose_wired,
    "crossed": propose_crossed,
    "spread": propose_spread,
    "through bfloat16": propose_through_bfloat,
    "bytes": propose_bytes,
    "lookup": propose_lookup,
    "table": propose_table,
    "reference": propose_reference,
}
"""Ways to decode; of equally cheap ones the first is used."""

RAW_STRATEGIES: dict[str, ProposeRaw] = {
    "placed": propose_placed,
    "wired, unscaled": propose_raw_wired,
    "crossed, unscaled": propose_raw_crossed,
    "spread, unscaled": propose_raw_spread,
    "signed": propose_signed,
}
"""Further ways where raw numbers will do."""

LANES = ("lanes", "dense")
BY_LANE = (*LANES, "bytes", *SIGN_PLACES)

STRATEGY_ORDERS = {
    "pass-through": ("lanes",),
    "magic": BY_LANE,
    "wired": BY_LANE,
    "wired, unscaled": BY_LANE,
    "through bfloat16": BY_LANE,
    "reference": BY_LANE,
    "lookup": (*LANES, "pairs"),
    "table": (*LANES, "bytes", "pairs"),
    "crossed": tuple(CROSSED),
    "spread": tuple(SPREAD),
    "spread, unscaled": tuple(SPREAD),
    "crossed, unscaled": tuple(CROSSED),
}
"""Orders of packed bits that a strategy can read; the others read `LANES`."""

NEEDS = {"through bfloat16": (8, 0)}
"""Least compute capability of strategies that not every device with the operand type can run."""

OFFSET_CLOCKS = 4.0
"""Clocks per tile that an offset costs a kernel which sums x once for all rows."""

SIGNS = 0x80008000
"""Signs of two 16-bit floats."""

FP8_OPERANDS = ("fp8_e4m3", "fp8_e5m2")
"""fp8 tensor cores take operands of two different fp8 types."""


@dataclass(frozen=True)
class Proven:
    """A recipe that passed its proof.

    Parameters
    ----------
    strategy
        Its row in `STRATEGIES`.
    recipe
        The steps.
    meaning
        What the registers' numbers stand for.
    cost
        Cost of all operand registers of a thread's share of a tile, without scales.
    """

    strategy: str
    recipe: Recipe
    meaning: Meaning
    cost: Cost

    def weight(self, offset_clocks: float = OFFSET_CLOCKS) -> float:
        """Return what recipes are ranked by; an offset is taken from sums, which costs something too."""
        return self.cost.weight + (offset_clocks if any(self.meaning.offsets) else 0.0)


PROVEN_FOR = ("operand", "zero", "raw", "order")
"""What of a conversion, beside its type, proofs are kept by."""

_proven: dict[tuple[Any, ...], list[Proven]] = {}


def proven_recipes(conversion: Conversion) -> list[Proven]:
    """Return every recipe that is proven for a conversion, cheapest first.

    Raises
    ------
    VerificationError
        If no recipe passes.
    """
    ttype = conversion.ttype
    values = ttype.probe_values().tobytes()
    key = (ttype.name, ttype.elem_bits, values, *(getattr(conversion, x) for x in PROVEN_FOR))
    if key not in _proven:
        _proven[key] = _prove_all(conversion)
    return _proven[key]


def _proposals(conversion: Conversion) -> Iterator[tuple[str, Recipe, Meaning]]:
    raw = RAW_STRATEGIES if conversion.raw else {}
    for strategy in (*raw, *STRATEGIES):
        if conversion.order not in STRATEGY_ORDERS.get(strategy, LANES):
            continue
        if strategy in raw:
            yield from ((strategy, *proposal) for proposal in raw[strategy](conversion))
        else:
            yield from ((strategy, recipe, PLAIN) for recipe in STRATEGIES[strategy](conversion))


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
    """Tell whether a recipe needs neither a device's instructions nor a table."""
    return proven.strategy not in NEEDS and not table_bytes(proven.recipe)


def cheapest(
    conversion: Conversion,
    capability: tuple[int, int],
    table: int = 0,
    offset_clocks: float = OFFSET_CLOCKS,
) -> Proven:
    """Return the cheapest proven recipe that a compute capability can run.

    Parameters
    ----------
    table
        Bytes of shared memory that the kernel has for a table.
    offset_clocks
        Clocks per tile that an offset costs the kernel.
    """
    usable = [
        x
        for x in proven_recipes(conversion)
        if _usable(x, capability, table) and max(map(abs, x.meaning.gains)) <= LARGEST_GAIN
    ]
    return min(usable, key=lambda x: x.weight(offset_clocks))


def _usable(proven: Proven, capability: tuple[int, int], table: int) -> bool:
    return capability >= NEEDS.get(proven.strategy, (0, 0)) and table_bytes(proven.recipe) <= table


def table_bytes(recipe: Recipe) -> int:
    """Return the shared memory that a recipe's table takes."""
    return recipe.bytes if isinstance(recipe, Table) else 0


def table_sizes(gemm: Gemm) -> list[int]:
    """Return the bytes of shared memory that tables of a problem's decoders take, largest first."""
    element = get_type(gemm.weight).element_type
    order = packed_order(element, gemm.activation)
    found = proven_recipes(Conversion(element, operand_type(gemm), order=order))
    sizes = {table_bytes(proven.recipe) for proven in found if proven.strategy != "reference"}
    return sorted(sizes or {0}, reverse=True)


def packed_order(ttype: TType, core: str) -> str:
    """Return the order of packed bits in which a type decodes cheapest for activations of type ``core``."""
    found = orders(ttype.elem_bits, lane_of(core))
    if len(found) == 1:
        return found[0]
    operand = _operand(ttype, core, "none")
    conversions = [Conversion(ttype, operand, raw=True, order=order) for order in found]
    return min(filter(_decodable, conversions), key=lambda x: proven_recipes(x)[0].weight()).order


def _decodable(conversion: Conversion) -> bool:
    """Tell whether any recipe reads a type in an order."""
    return any(True for _ in _proposals(conversion))


def packed_layout(ttype: TType, core: str) -> FragmentLayout:
    """Return the layout of a type's packed codes for activations of type ``core``."""
    return FragmentLayout(ttype.elem_bits, lane_of(core), packed_order(ttype, core))


def count(recipe: Recipe, conversion: Conversion) -> Cost:
    """Return the cost of decoding a thread's share of a tile (32 codes)."""
    m = CountingMachine()
    words = [m.input(None) for _ in range(conversion.bits)]
    zero = m.input(None) if conversion.zero == "integer" else None
    for register in range(conversion.lane):
        recipe.register(m, words, register, zero)
    return m.cost


class LoadedWords(Sequence[Word]):
    """A thread's packed words, read from a local buffer when first used."""

    def __init__(self, m: Machine, buffer: Any, count: int) -> None:
        self._machine, self._buffer, self._count = m, buffer, count
        self._read: dict[int, Word] = {}

    def __len__(self) -> int:
        """Return the number of words."""
        return self._count

    def __getitem__(self, index: Any) -> Any:
        """Return one word."""
        if index not in self._read:
            self._read[index] = self._machine.input(b.bind(self._buffer[index]))
        return self._read[index]


@dataclass(frozen=True)
class Decoder:
    """Decodes one weight type to one operand type.

    Parameters
    ----------
    conversion
        What is decoded.
    zero
        How zero points that `registers` subtracts are stored (`Gemm.zero`); ``"none"`` if there
        are none or if they are left to the accumulator.
    choice
        The proven recipe.
    fold
        How scales multiply raw operands, where they do not multiply values.
    """

    conversion: Conversion
    zero: str
    choice: Proven
    fold: Fold | None = None

    @property
    def gains(self) -> tuple[float, float]:
        """Factors of rows g and g+8: ``value = gain * raw + offset``. Powers of two times the type's step."""
        if self.fold is not None:
            return 2.0**self.fold.exponent, 2.0**self.fold.exponent
        return self.choice.meaning.gains

    @property
    def offsets(self) -> tuple[float, float]:
        """Offsets of rows g and g+8.

        Where one is not 0 the accumulator adds ``offset * sum(x)``; both terms cancel in part, so
        sums of a 16-bit core should be taken at least every 256 elements of K (offsets of bfloat16
        reach 136).
        """
        return self.choice.meaning.offsets if self.fold is None else (0.0, 0.0)

    @property
    def subtracts_zeros(self) -> bool:
        """Whether `registers` takes zero points; otherwise the accumulator subtracts ``zero * sum(x)``."""
        return self.zero != "none"

    @property
    def operand(self) -> str:
        """Operand type of the decoded registers."""
        return self.conversion.operand

    @property
    def words(self) -> int:
        """32-bit words of a thread per 64 x 64 tile."""
        return self.conversion.bits

    @property
    def lane(self) -> int:
        """Bits of one element in a register."""
        return self.conversion.lane

    @property
    def table_words(self) -> int:
        """uint32 words of shared memory that the decoder's table takes: 0 if it has none.

        The kernel allocates them, emits `fill_table` before a barrier, and hands a `SharedTable` to
        `registers`.
        """
        return table_bytes(self.choice.recipe) // 4

    @property
    def table_entries(self) -> int:
        """Entries of the decoder's table: 0 if it has none."""
        return len(self.choice.recipe.entries) if isinstance(self.choice.recipe, Table) else 0

    def fill_table(self, buffer: Any, thread: Expr, threads: int) -> None:
        """Emit this thread's share of writing the table to shared memory.

        Parameters
        ----------
        buffer
            uint32 words, `table_words` of them.
        thread, threads
            This thread, and the number, of the threads that fill it.
        """
        table = self.choice.recipe
        assert isinstance(table, Table)
        fill_table(buffer, table.values, table.step, table.row, thread, threads)

    def registers(
        self,
        tile_words: Any,
        first: int,
        count: int,
        out: Any,
        out_first: int,
        scales: tuple[Any, Any] | None,
        zeros: tuple[Any, Any] | None,
        table: SharedTable | None = None,
        *,
        at: int | None = None,
        prepared: bool = False,
    ) -> None:
        """Emit the decode of registers ``first .. first+count-1`` of the thread's tile.

        Parameters
        ----------
        tile_words
            Local uint32 buffer of all the thread's words, planes one after another.
        out, out_first
            Local uint32 buffer that receives the registers, and where.
        scales
            Scales of rows g and g+8 in both halves of a uint32 (16-bit cores), or None.
        zeros
            Zero points of rows g and g+8: uint32 with the value in both halves (16-bit cores)
            or all four bytes (8-bit cores); for real zero points, pairs (coarse part, remainder).
        table
            The decoder's table, if it has one (`table_words`).
        at
            Byte of ``scales`` that holds the exponent, where those are words of exponents.
        prepared
            Whether ``scales`` holds lists of what `prepare` made of the scales.
        """
        m = self.machine(table)
        words = LoadedWords(m, tile_words, self.words)
        parts = (None, None) if zeros is None else tuple(self._parts(m, zero) for zero in zeros)
        factors = None if scales is None else self._factors(m, scales, at, prepared)
        for index in range(first, first + count):
            factor = None if factors is None else factors[index % 2]
            value = self.value(m, words, index, factor, parts[index % 2])
            b.store(out, value.content, out_first + index - first)

    def machine(self, table: SharedTable | None) -> TirMachine:
        """Return what emits the instructions."""
        return TirMachine(table)

    def _factors(
        self, m: Machine, scales: tuple[Any, Any], at: int | None, prepared: bool
    ) -> list[list[Word]]:
        """Return the factors of rows g and g+8."""
        if prepared:
            return [[m.input(factor) for factor in row] for row in scales]
        return [self.prepare(m, m.input(scale), half, at) for half, scale in enumerate(scales)]

    @property
    def factors(self) -> int:
        """Registers that `prepare` makes of one row's scale."""
        return len(self._powers(0))

    def _powers(self, half: int) -> tuple[float, ...]:
        return (1.0,) if self.fold is None else self.fold.powers(half)

    def prepare(self, m: Machine, scale: Word, half: int, at: int | None = None) -> list[Word]:
        """Return what multiplies, and what is then added, in row g (``half`` 0) or g+8.

        ``scale`` holds the scale twice or, if ``at`` is given, its exponent in that byte.
        """
        powers = self._powers(half)
        if at is None:
            return [times(m, self.operand, scale, power) if power else m.constant(0) for power in powers]
        byte = exponent_byte(m, scale, at)
        return [power_of(m, self.operand, byte, power) if power else m.constant(0) for power in powers]

    def _parts(self, m: Machine, zero: Any) -> tuple[Word, ...]:
        return tuple(m.input(part) for part in (zero if self.zero == "float" else (zero,)))

    def value(
        self,
        m: Machine,
        words: Sequence[Word],
        index: int,
        factors: Sequence[Word] | None,
        zero: tuple[Word, ...] | None,
    ) -> Word:
        """Return operand register ``index`` on a machine: decoded, less its zero point, times its scale.

        ``factors`` is what `prepare` made of the scale.
        """
        recipe = self.choice.recipe
        inside = zero[0] if zero is not None and self.zero == "integer" else None
        value = recipe.register(m, words, index, inside)
        if zero is not None and self.zero == "float":
            return self._less_real_zero(m, value, zero, factors)
        if factors is None:
            return value
        if len(factors) == 1:
            return m.float_mul(self.operand, value, factors[0])
        return m.float_fma(self.operand, value, *factors)

    def _less_real_zero(
        self, m: Machine, value: Word, zero: tuple[Word, ...], factors: Sequence[Word] | None
    ) -> Word:
        """Return ``(value - coarse - rest) * scale`` of a zero point's parts.

        Of values less the coarse part nothing is rounded away, so the multiply-add is the only rounding of
        a value's own size.
        """
        coarse, rest = zero
        value = m.float_sub(self.operand, value, coarse)
        if factors is None:
            return m.float_sub(self.operand, value, rest)
        (scale,) = factors
        shift = m.float_mul(self.operand, rest, scale)
        minus = m.lop3(shift, m.constant(SIGNS), m.constant(0), XOR)
        return m.float_fma(self.operand, value, scale, minus)


def operand_type(gemm: Gemm) -> str:
    """Return the operand type that weights are decoded to: that of the activations.

    Tensor cores take two different fp8 types, so the other one serves if only it fits.

    Raises
    ------
    ConversionError
        If the type does not fit without loss (names a core that does), or if real zero points
        meet an 8-bit core.
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


def make_decoder(
    gemm: Gemm,
    device: TileDevice,
    placement: str = "operand",
    *,
    gains: bool = False,
    table: int = 0,
    offset_clocks: float = OFFSET_CLOCKS,
) -> Decoder:
    """Return the cheapest proven decoder for a problem.

    Parameters
    ----------
    gemm
        The problem.
    device
        Its compute capability limits the choice.
    placement
        ``"operand"``: registers hold values less their zero points, times their scale where one is given.
        ``"accumulator"``: registers hold raw numbers (`Decoder.gains`, `Decoder.offsets`), and zero
        points are left to the accumulator unless `Decoder.subtracts_zeros`.
    gains
        Whether the kernel multiplies finished sums by `Decoder.gains` with placement ``"operand"`` too.
    table
        Bytes of shared memory that the kernel has for a table (`Decoder.table_words`).
    offset_clocks
        Clocks that an offset costs a warp per tile with placement ``"accumulator"``: those of its sums
        of x, where it needs them for nothing else.

    Raises
    ------
    ConversionError
        If the core cannot hold the weight's values.
    VerificationError
        If no recipe passes its proof.
    """
    device.core_for(gemm.activation)
    operand, element = operand_type(gemm), get_type(gemm.weight).element_type
    raw = placement == "accumulator"
    # fp8 tensor cores keep too few bits of a sum to take zero points from it afterwards.
    zero = "none" if raw and operand not in FP8_OPERANDS else gemm.zero
    inside = "integer" if zero == "integer" else "none"
    conversion = Conversion(element, operand, inside, raw, packed_order(element, gemm.activation))
    summed = gemm.zero != "none" and zero == "none"
    clocks = 0.0 if summed else offset_clocks
    plain = Decoder(conversion, zero, cheapest(conversion, device.compute_capability, table, clocks))
    if raw or not gains or zero != "none":
        return plain
    choices = (plain, *_folding(plain, gemm.scale, device, table))
    return min(choices, key=lambda decoder: decoder.choice.cost.weight)


def _folding(plain: Decoder, scaled: bool, device: TileDevice, table: int) -> Iterator[Decoder]:
    """Yield decoders for placement ``"operand"`` whose gain is left to the finished sums."""
    conversion = replace(plain.conversion, raw=True)
    limits = conversion.ttype
    for proven in proven_recipes(conversion):
        folded = fold(conversion.operand, proven.meaning, max(abs(limits.minimum), abs(limits.maximum)))
        if not _usable(proven, device.compute_capability, table) or folded is None:
            continue
        if scaled:
            yield Decoder(conversion, "none", proven, folded)
        elif not any(proven.meaning.offsets) and max(map(abs, proven.meaning.gains)) <= LARGEST_GAIN:
            yield Decoder(conversion, "none", proven)


def load_order(bits: int) -> list[tuple[int, int]]:
    """Return how a thread loads its words of a tile: pairs (offset, vector).

    Thread t loads ``vector`` words from ``offset + t * vector``, in words from the start of the
    tile; one after another they are the words that `Decoder.registers` takes.
    """
    order, start = [], 0
    for width, _ in planes(bits):
        vector = min(width, 4)
        order += [(start + chunk * THREADS * vector, vector) for chunk in range(width // vector)]
        start += THREADS * width
    return order
