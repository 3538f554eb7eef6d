"""When a test at small extents proves equality at all extents: the proof is in this package's `README.md`."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from ladder.ir.build import bind
from ladder.ir.graph import Graph
from ladder.superopt.verifier.bound import Bound, bound_of
from ladder.superopt.verifier.certificate import (
    DELTA,
    EXPONENTIALS,
    FREE,
    RELATED,
    ROOTS,
    Certificate,
    Mode,
    modes_of,
    most_telling,
)
from ladder.superopt.verifier.equivalence import SEED_BITS, Entropy, certify, forms_of
from ladder.superopt.verifier.forms import Bounding
from ladder.superopt.verifier.symbols import Findings, Symbols, examine, symbols_of
from tile_types.errors import VerificationError
from tile_types.tile import Extent

LARGEST = 96
"""Largest extent that is tried."""

MOST_TESTS = 64
"""Most combinations of extents of symbols settled by sums."""

PROBE = 2


@dataclass(frozen=True)
class Settlement:
    """How each symbol is settled.

    summed: All symbols that are summed over.
    supports: Those settled by supports.
    windows: Symbol -> largest extent of its window, for those settled by sums.
    """

    summed: frozenset[str]
    supports: frozenset[str]
    windows: Mapping[str, int]


def plan(first: Graph, second: Graph, *, free: bool = False) -> Settlement:
    """Choose an argument for every symbol.

    free: Whether all functions are unknown.
    Raises VerificationError: Names the node at which the arguments of this module fail.
    """
    findings = Findings(free=free)
    outputs = examine(first, findings), examine(second, findings)
    swapped = {(a, b) for a, b in findings.before if (b, a) in findings.before}
    if swapped:
        raise VerificationError(
            "small extents do not prove all:"
            f" indices of {' and '.join(min(swapped))} are joined in two orders"
        )
    summed = frozenset(findings.summed)
    supports = summed - frozenset(findings.loose) - findings.bent
    windows = {name: _window(name, findings, *outputs) for name in sorted(summed - supports)}
    windows |= {name: max(windows.get(name, 1), 2) for name in findings.greatest - supports if free}
    return Settlement(summed, supports, windows)


def _window(name: str, findings: Findings, first: Sequence[Symbols], second: Sequence[Symbols]) -> int:
    """Return the largest extent to test of a symbol settled by sums."""
    if name in findings.tied:
        both = [why for why in (findings.loose.get(name), findings.tied[name]) if why]
        raise VerificationError("; ".join(both))
    largest = 1
    for a, b in zip(first, second, strict=True):
        left, right = a.of(name), b.of(name)
        high = max(left.high + right.under_high, right.high + left.under_high)
        low = min(left.low + right.under_low, right.low + left.under_low)
        empty = low > 0 and name not in a.varies | b.varies
        largest = max(largest, high if empty else high + 1)
    return largest


def verify_for_all_extents(
    first: Graph, second: Graph, *, delta: float | Fraction = DELTA, seed: int | None = None
) -> tuple[Certificate, dict[str, int]]:
    """Decide whether a program over symbolic extents can replace another at all extents.

    Parameters
    ----------
    first, second, delta, seed
        As of `verify_equal`.

    Returns
    -------
    Certificate
        As of `verify_equal`; refused where the argument of this module does not apply.
    dict
        The largest extent of every symbol in the tests.
    """
    from ladder.superopt.verifier.congruence import abstracted

    drawn = secrets.randbits(SEED_BITS) if seed is None else seed
    each, entropy = Fraction(delta) / (len(WAYS) + 1), (drawn,)
    tried: list[tuple[Certificate, dict[str, int]]] = []
    for number, way in enumerate(WAYS):
        modes = [mode for mode in modes_of(first, second) if mode in way]
        if modes:
            tried.append(_for_all(first, second, each, (*entropy, number), modes))
            if tried[-1][0].equal:
                break
    else:
        prove = partial(_same_value, entropy=(*entropy, len(WAYS)))
        pair = abstracted(first, second, prove, each / 2)
        if pair is not None:
            number = len(WAYS) + 1
            last, at = _for_all(*pair, each / 2, (*entropy, number), [FREE], domains=(first, second))
            if last.equal:  # else nothing follows: different functions may be equal after all
                tried.append((replace(last, delta=last.delta + each / 2), at))
    certificates = [certificate for certificate, _ in tried]
    found = certificates[-1] if certificates[-1].equal else most_telling(certificates)
    extents = tried[certificates.index(found)][1]
    if found.equal:
        found = replace(found, delta=found.delta + each * (len(tried) - 1))
    return found.seeded(drawn, own=seed is None), extents


WAYS: tuple[tuple[Mode, ...], ...] = ((FREE,), (EXPONENTIALS, ROOTS), RELATED)
"""Modes that are tried together."""


def _same_value(first: Graph, second: Graph, delta: Fraction, number: int, entropy: Entropy) -> bool:
    """Whether programs without functions are equal at all extents, wherever both are defined."""
    return _for_all(first, second, delta, (*entropy, number), [FREE], domains=None)[0].equal


def _for_all(
    first: Graph,
    second: Graph,
    delta: Fraction,
    entropy: Entropy,
    modes: Sequence[Mode],
    domains: tuple[Graph, Graph] | tuple[()] | None = (),
) -> tuple[Certificate, dict[str, int]]:
    """Test two programs in some modes at all extents that a plan asks for.

    domains: Programs of which the second must be defined where the first is, if not those; None: none are.
    """
    try:
        chosen = plan(first, second, free=list(modes) == [FREE])
        names = symbols_of([extent for graph in (first, second) for extent in _all_extents(graph)])
        largest = {name: chosen.windows.get(name, 1) for name in names}
        probe = {**largest, **dict.fromkeys(chosen.supports, PROBE)}
        bounds = _bounds(bind(first, probe), bind(second, probe), modes)
        needed = max(map(needed_extent, bounds))
        tests = [dict(zip(chosen.windows, extents, strict=True)) for extents in _grid(chosen.windows)]
    except VerificationError as error:
        return Certificate("refused", str(error)), {}
    if needed > LARGEST or len(tests) > MOST_TESTS:
        reason = (
            f"extent {needed} needed, at most {LARGEST}" if needed > LARGEST else f"{len(tests)} tests needed"
        )
        return Certificate("refused", f"small extents do not prove all: {reason}"), {}
    extents = {**largest, **dict.fromkeys(chosen.supports, needed)}
    found: list[Certificate] = []
    for number, test in enumerate(tests):
        at = {**extents, **test}
        small = bind(first, at), bind(second, at)
        within = domains and (bind(domains[0], at), bind(domains[1], at))
        found.append(certify(*small, delta / len(tests), (*entropy, number), modes, domains=within))
        if not found[-1].equal:
            return found[-1], at
    if [_sizes(bound) for bound in _bounds(*small, modes)] != [_sizes(bound) for bound in bounds]:
        reason = "small extents do not prove all: degrees, exponents or roots grow with the extents"
        return replace(found[-1], verdict="refused", reason=reason, delta=Fraction(0)), extents
    return joined(found), extents


def _grid(windows: Mapping[str, int]) -> Sequence[tuple[int, ...]]:
    return list(itertools.product(*(range(1, last + 1) for last in windows.values())))


def joined(found: Sequence[Certificate]) -> Certificate:
    """Return the last certificate (of the largest extents) with the errors, rounds and draws of all."""
    return replace(
        found[-1],
        delta=sum((certificate.delta for certificate in found), Fraction(0)),
        rounds=sum(certificate.rounds for certificate in found),
        draws=sum(certificate.draws for certificate in found),
    )


def _sizes(bound: Bound) -> tuple[int, int, int]:
    return bound.degree, bound.terms, bound.radicands


def needed_extent(bound: Bound) -> int:
    """Return n of the argument of supports."""
    d = bound.degree
    exponents = 2 * d if bound.terms > 1 else 0
    return 1 + max(d, exponents, bound.radicand_degree)


def _all_extents(graph: Graph) -> list[Extent]:
    extents: list[Extent] = []
    for owner, node in graph.walk():
        extents += [axis.extent for axis in (*owner.grid, *owner.loops)]
        extents += [extent for tile in node.tiles for extent in tile.shape]
    return extents


def _bounds(first: Graph, second: Graph, modes: Sequence[Mode]) -> list[Bound]:
    found: list[Bound] = []
    for mode in modes:
        boundings = [Bounding(mode.uninterpreted), Bounding(mode.uninterpreted)]
        try:
            a, b = (forms_of(*pair) for pair in zip((first, second), boundings, strict=True))
        except VerificationError:
            if mode is modes[-1] and not found:
                raise
            continue
        bound = bound_of(a, b, any(each.exponentials for each in boundings)).with_functions(boundings)
        roots = sum(each.roots for each in boundings)
        bound = bound.with_relations(roots) if mode.related else bound
        found.append(bound if "sqrt" in mode.uninterpreted else bound.with_radicands(roots))
    return found
