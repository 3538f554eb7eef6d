"""Where programs are defined: whether the second is wherever all values of the first are finite.

A program divides by what is not 0, takes roots of what is not negative, and logarithms of what is positive,
at all inputs for which all its values are finite. These are the *facts* that the first program gives; the
second one's *conditions* must follow from them. What is known of a value is its sign and whether it is 0:
by construction (squares, exponentials, sums of what is not negative ...), because it is the value of a fact,
or because a product or quotient that is a fact has it as a factor. Equal values are recognised as equal
residues in fields of 61 bits: wrongly with the probability that a polynomial vanishes, per pair and round.

The rules mention no extents, so that what follows at the extents of a test follows at all for which the
values that were recognised as equal are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.ir.finite import Field, Residues
from ladder.ir.graph import Graph, Node
from ladder.ir.interpret import interpret
from ladder.ir.modular import UndefinedResidueError
from ladder.ir.quantized_values import Components
from ladder.superopt.verifier.bound import difference, repetitions, vanishing_in_large
from ladder.superopt.verifier.forms import Radicand
from ladder.superopt.verifier.relations import Product, RootRelations
from ladder.superopt.verifier.values import Conversions, domain_of
from tile_types.errors import VerificationError

Array = npt.NDArray[Any]

NOT_ZERO, NOT_NEGATIVE = "apart", "low"

COMPLAINTS = {
    NOT_ZERO: "divides by what may be 0",
    NOT_NEGATIVE: "takes a root or a logarithm of what may be negative",
}

POSITIVE = frozenset({"exp", "exp2", "sigmoid"})
ASKING = (("div", 1, NOT_ZERO), ("sqrt", 0, NOT_NEGATIVE), ("rsqrt", 0, NOT_NEGATIVE), ("rsqrt", 0, NOT_ZERO))
"""Operators, which operand they ask something of, and what."""

PARTIAL = frozenset({"log", "log2", "log10", "pow"})
"""Functions that are not defined everywhere: logarithms where positive, ``pow`` where the base is."""

MOST_ROUNDS = 256
DRAWS = 64


@dataclass(frozen=True, eq=False)
class Signed:
    """Residues and what is known of the numbers: not negative, not positive, not 0."""

    residues: Residues
    low: Array
    high: Array
    apart: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.residues.shape

    @property
    def zero(self) -> Signed:
        yes, no = np.ones((), bool), np.zeros((), bool)
        return Signed(self.residues.zero, yes, yes, no)

    @property
    def p(self) -> Array:
        """The residues."""
        return self.residues.p

    def map(self, function: Callable[[Array], Array]) -> Signed:
        return Signed(
            self.residues.map(function), function(self.low), function(self.high), function(self.apart)
        )


@dataclass
class Facts:
    """Residues of values of which something is known.

    known: What is known -> sorted residues.
    """

    known: dict[str, Array] = field(
        default_factory=lambda: {kind: np.zeros(0, np.int64) for kind in (NOT_ZERO, NOT_NEGATIVE, "defined")}
    )

    def add(self, kind: str, values: Array) -> bool:
        """Add values; returns whether any are new."""
        before = self.known[kind]
        self.known[kind] = np.union1d(before, _flat(values))
        return len(self.known[kind]) > len(before)

    def has(self, kind: str, values: Array) -> Array:
        return np.isin(_flat(values), self.known[kind]).reshape(np.shape(values))

    @property
    def count(self) -> int:
        return sum(len(values) for values in self.known.values())


def _flat(values: Array) -> Array:
    """Return residues below 2**63 as numbers of the machine."""
    return np.ravel(values).astype(np.int64)


@dataclass
class _Step:
    """One operation, for what follows of its result for its operands."""

    result: Array
    operands: tuple[Array, ...]


class Signs:
    """Arithmetic on `Signed`: the interface of `ladder.ir.finite.Arithmetic`.

    field: Of the residues, with all functions unknown.
    facts: What is known beforehand; None: only what construction says.
    everywhere: Whether facts are looked up for every value, or for conditions only.
    """

    def __init__(self, field: Field, facts: Facts | None = None, everywhere: bool = False) -> None:
        if field.unknowns is not None:
            field.unknowns.restart()
        self.field, self.facts, self.everywhere = field, facts, everywhere
        self.asked: dict[str, list[Array]] = {NOT_ZERO: [], NOT_NEGATIVE: [], "defined": []}
        self.unmet: list[str] = []
        self.taken: Collection[int] = ()
        self.steps: list[_Step] = []
        self.compared = 0

    @property
    def uninterpreted(self) -> Collection[str]:
        return self.field.uninterpreted

    # ---- values ----------------------------------------------------------------------------------------
    def variables(self, residues: Residues) -> Signed:
        """Return inputs, of which nothing is known."""
        return self._made(residues, *(np.zeros(residues.shape, bool) for _ in range(3)))

    def number(self, value: float) -> Signed:
        flags = (np.asarray(flag) for flag in (value >= 0, value <= 0, value != 0))
        return Signed(self.field.number(value), *flags)

    def _made(self, residues: Residues, low: Array, high: Array, apart: Array) -> Signed:
        low, high, apart = (np.array(np.broadcast_to(flag, residues.shape)) for flag in (low, high, apart))
        made = Signed(residues, low, high, apart)
        return self._looked_up(made) if self.everywhere else made

    def _looked_up(self, a: Signed) -> Signed:
        """Add what facts say of a value."""
        if self.facts is None:
            return a
        minus = -a.p % self.field.p
        self.compared += 4 * a.p.size * self.facts.count
        apart = self.facts.has(NOT_ZERO, a.p) | self.facts.has(NOT_ZERO, minus)
        low, high = self.facts.has(NOT_NEGATIVE, a.p), self.facts.has(NOT_NEGATIVE, minus)
        return Signed(a.residues, a.low | low, a.high | high, a.apart | apart)

    def _ask(self, kind: str, a: Signed) -> None:
        """Note a condition, and whether it is met."""
        self.asked[kind].append(a.p)
        if not np.all(getattr(a, kind)) and not np.all(getattr(self._looked_up(a), kind)):
            self.unmet.append(kind)

    # ---- arithmetic ------------------------------------------------------------------------------------
    def add(self, a: Signed, b: Signed) -> Signed:
        low, high = a.low & b.low, a.high & b.high
        apart = (low | high) & (a.apart | b.apart)
        return self._made(self.field.add(a.residues, b.residues), low, high, apart)

    def subtract(self, a: Signed, b: Signed) -> Signed:
        low, high = a.low & b.high, a.high & b.low
        residues = self.field.subtract(a.residues, b.residues)
        return self._made(residues, low, high, (low | high) & (a.apart | b.apart))

    def multiply(self, a: Signed, b: Signed) -> Signed:
        result = self._product(self.field.multiply(a.residues, b.residues), a, b)
        self.steps.append(_Step(result.p, (a.p, b.p)))
        return result

    def divide(self, a: Signed, b: Signed) -> Signed:
        """Return ``a / b``, under the condition that b is not 0."""
        self._ask(NOT_ZERO, b)
        result = self._product(self.field.divide(a.residues, b.residues), a, b)
        result = self._made(result.residues, result.low, result.high, np.broadcast_to(a.apart, result.shape))
        self.steps.append(_Step(result.p, (a.p,)))
        return result

    def _product(self, residues: Residues, a: Signed, b: Signed) -> Signed:
        same = np.asarray(a is b)
        if self.facts is not None:
            same = same | (a.p == b.p)
            self.compared += residues.p.size
        low = same | (a.low & b.low) | (a.high & b.high)
        return self._made(residues, low, (a.low & b.high) | (a.high & b.low), a.apart & b.apart)

    def negate(self, a: Signed) -> Signed:
        residues = self.field.negate(a.residues)
        self.steps.append(_Step(residues.p, (a.p,)))
        return self._made(residues, a.high, a.low, a.apart)

    def root(self, a: Signed) -> Signed:
        """Return the root of ``a``, under the condition that it is not negative."""
        residues = self.field.root(a.residues)
        low, apart = self._of_relations(residues.shape)
        a = replace(a, low=a.low | low)
        self._ask(NOT_NEGATIVE, a)
        self.steps.append(_Step(residues.p, (a.p,)))
        return self._made(residues, np.asarray(True), np.asarray(False), apart | self._looked_up(a).apart)

    def _of_relations(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Return where a root is made of roots that the first program takes, and where none of those is 0."""
        relations = None if self.field.unknowns is None else self.field.unknowns.relations
        if not isinstance(relations, RootRelations):
            return np.zeros(shape, bool), np.zeros(shape, bool)
        made = [[number for number, _ in product.roots] for product in relations.latest]
        for roots, product in zip(made, relations.latest, strict=True):
            if not product.new:
                parts = tuple(relations.store[number].p[1:] for number in roots)
                self.steps.append(_Step(_element(self.field, relations, product), parts))
        low = [all(number in self.taken for number in roots) for roots in made]
        apart = [all(self._is_apart(relations, number) for number in roots) for roots in made]
        return np.reshape(low, shape), np.reshape(apart, shape)

    def _is_apart(self, relations: RootRelations, number: int) -> bool:
        """Whether facts say that a root is not 0."""
        if self.facts is None:
            return False
        self.compared += self.facts.count
        return bool(self.facts.has(NOT_ZERO, relations.store[number].p).any())

    def exponential(self, a: Signed) -> Signed:
        return self.function("exp", [a])

    def function(self, name: str, values: Sequence[Signed]) -> Signed:
        """Return the value of an unknown function, under the conditions of its name."""
        residues = self.field.function(name, [value.residues for value in values])
        if name.split(" ")[0] in PARTIAL:
            self._ask_defined(name.split(" ")[0], residues, values[0])
        positive = np.asarray(name in POSITIVE)
        never = np.asarray(False)
        return self._made(residues, positive | np.asarray(name == "step"), never, positive)

    def _ask_defined(self, name: str, residues: Residues, a: Signed) -> None:
        """Note that a function is defined: where it was before, or where its operand is positive."""
        self.asked["defined"].append(residues.p)
        if name in ("log", "log2", "log10"):
            self.asked[NOT_ZERO].append(a.p)
            self.asked[NOT_NEGATIVE].append(a.p)
        if self.facts is not None:
            self.compared += residues.p.size * self.facts.count
            if np.all(self.facts.has("defined", residues.p)):
                return
        for kind in (NOT_NEGATIVE, NOT_ZERO):
            if not np.all(getattr(self._looked_up(a), kind)):
                self.unmet.append(NOT_NEGATIVE)
                return

    def total(self, a: Signed, axis: int, keep: bool) -> Signed:
        low, high = (np.asarray(flag.all(axis=axis, keepdims=keep)) for flag in (a.low, a.high))
        apart = (low | high) & np.asarray(a.apart.any(axis=axis, keepdims=keep))
        return self._made(self.field.total(a.residues, axis, keep), low, high, apart)

    def maximum(self, a: Signed, axis: int, keep: bool) -> Signed:
        low, positive = (np.asarray(f.any(axis=axis, keepdims=keep)) for f in (a.low, a.low & a.apart))
        high, negative = (np.asarray(f.all(axis=axis, keepdims=keep)) for f in (a.high, a.high & a.apart))
        return self._made(self.field.maximum(a.residues, axis, keep), low, high, positive | negative)

    def joined(self, values: Sequence[Signed], function: Callable[[Sequence[Array]], Array]) -> Signed:
        """Apply a rearrangement of several arrays."""
        parts = ([getattr(value, name) for value in values] for name in ("low", "high", "apart"))
        residues = self.field.joined([value.residues for value in values], function)
        return Signed(residues, *(np.asarray(function(part)) for part in parts))

    # ---- facts -------------------------------------------------------------------------------------------
    def concluded(self) -> Facts:
        """Return what follows from the program being finite."""
        facts = Facts()
        for kind, values in self.asked.items():
            for value in values:
                facts.add(kind, value)
        grew = [True]
        while any(grew):
            grew = [self._factors(facts, step) for step in self.steps]
        return facts

    def _factors(self, facts: Facts, step: _Step) -> bool:
        """Add the factors of what is not 0: a product, quotient or root has no operand that is."""
        known = facts.has(NOT_ZERO, step.result)
        self.compared += step.result.size * facts.count
        if not known.any():
            return False
        parts = [np.broadcast_to(operand, step.result.shape)[known] for operand in step.operands]
        grew = [facts.add(NOT_ZERO, part) for part in parts]
        return any(grew)


Draw = Callable[[], tuple[Sequence[Field], Sequence[Any]]]
"""Returns fields of both programs, all functions being unknown, and their inputs."""


Known = Mapping[int, Collection[str]]
"""Identity of a node of the second program -> what was proved of its value otherwise."""


def conditions(graph: Graph) -> Iterator[tuple[str, Node]]:
    """Yield each condition for a program's results to be finite, with the node whose value it concerns."""
    for node in graph.nodes:
        for operator, position, kind in ASKING:
            if node.operator == operator:
                yield kind, graph.producer(node.inputs[position])


def require_defined(
    first: Graph,
    second: Graph,
    draw: Draw,
    sizes: Sequence[Radicand],
    delta: Fraction,
    known: Known = MappingProxyType({}),
) -> Fraction:
    """Check that the second program is defined wherever all values of the first are finite.

    draw: Draws inputs and fields.
    sizes: Of all values of both programs.
    delta: Wanted bound on the probability of a wrong answer.
    known: What is known of values of the second program already.
    Returns Fraction: The bound.
    Raises VerificationError if it does not follow that it is.
    """
    pair = _Pair(first, second, draw, known)
    if pair.unmet(Search.NOTHING)[0] is None:
        return Fraction(0)
    for search in (Search.CONDITIONS, Search.EVERYTHING):
        reason, compared = pair.unmet(search)
        if reason is None:
            break
    if reason is not None:
        raise VerificationError(f"the second program {COMPLAINTS[reason]} where the first may be finite")
    once = compared * vanishing_in_large(*difference(sizes))
    rounds = repetitions(once, delta)
    if rounds is None or rounds > MOST_ROUNDS:
        raise VerificationError("too many values to say where the programs are defined; shrink the inputs")
    for _ in range(rounds - 1):
        if pair.unmet(search)[0] is not None:
            raise VerificationError("a value is 0 in one field and not in another: nothing is decided")
    return once**rounds


class Search(Enum):
    """For which values of the second program facts of the first are looked up."""

    NOTHING = 0
    CONDITIONS = 1
    EVERYTHING = 2


@dataclass(frozen=True)
class _Pair:
    """Two programs in a check."""

    first: Graph
    second: Graph
    draw: Draw
    known: Known

    def unmet(self, search: Search) -> tuple[str | None, int]:
        """Return a condition that is not met in a draw, and how many values were compared."""
        for _ in range(DRAWS):
            fields, operands = self.draw()
            try:
                facts, compared = self._facts(fields[0], operands, search)
                signs = Signs(fields[1], facts, search is Search.EVERYTHING)
                signs.taken = () if self._chooses else _taken(fields[0])
                _run(self.second, signs, operands, self.known)
            except UndefinedResidueError:
                continue
            return (signs.unmet[0] if signs.unmet else None), compared + signs.compared
        raise VerificationError(f"a division was undefined in {DRAWS} draws in a row")

    @property
    def _chooses(self) -> bool:
        """Whether values of the first program may go unused, so that they need not be finite."""
        return any(node.operator == "select" for _, node in self.first.walk())

    def _facts(self, own: Field, operands: Sequence[Any], search: Search) -> tuple[Facts | None, int]:
        """Return what the first program says: nothing if it does not use all that it computes."""
        signs = Signs(own)
        _run(self.first, signs, operands, {})
        if search is Search.NOTHING:
            return None, 0
        if self._chooses:
            return Facts(), 0
        return signs.concluded(), signs.compared


def _taken(own: Field) -> Collection[int]:
    """Return which radicands the first program's roots are made of: none of them is negative."""
    relations = None if own.unknowns is None else own.unknowns.relations
    return relations.own if isinstance(relations, RootRelations) else ()


def _element(own: Field, relations: RootRelations, product: Product) -> Array:
    """Return a root that is made of others."""
    value = own.number(1.0)
    for number, sign in product.roots:
        root = relations.store[number].map(lambda part: part[1:])
        value = own.multiply(value, root) if sign > 0 else own.divide(value, root)
    factor = product.factor.numerator * pow(product.factor.denominator, -1, own.p)
    return np.asarray(value.p * (factor % own.p) % own.p)


def _run(graph: Graph, signs: Signs, operands: Sequence[Any], known: Known) -> None:
    values = [
        signs.variables(value) if isinstance(value, Residues) else _components(signs, value)
        for value in operands
    ]
    domain = domain_of(Conversions.of(graph), signs)

    def keep(node: Node, value: Any) -> Any:
        kept = domain.keep(node, value)
        yes = np.ones(kept.shape, bool) if id(node) in known else None
        return replace(kept, **dict.fromkeys(known.get(id(node), ()), yes))

    interpret(graph, values, replace(domain, keep=keep))


def _components(signs: Signs, value: Any) -> Any:
    metadata = {name: signs.variables(array) for name, array in value.metadata.items()}
    return Components(signs.variables(value.elements), metadata, value.group)
