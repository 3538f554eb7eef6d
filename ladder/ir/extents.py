"""Symbolic extents: integers, or polynomials in named sizes kept as canonical text.

An extent is an ``int`` or a string such as ``"M"``, ``"4*M + 2"``, ``"ceildiv(M, 128)"`` or
``"max(M - 8, 0)"``. Equal polynomials have equal text, so shapes compare with ``==``.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, permutations
from keyword import iskeyword

from tile_types.errors import ShapeError
from tile_types.tile import Extent

MOST_COUNTED = (1 << 31) - (1 << 20)
"""Elements of a tensor that kernels count, in 32 bits: threads go some way beyond the last element."""

Shape = tuple[Extent, ...]
_Monomial = tuple[str, ...]
_Polynomial = dict[_Monomial, int]
_NAME = re.compile(r"[A-Za-z_]\w*")
FUNCTIONS: Mapping[str, Callable[[int, int], int]] = {
    "ceildiv": lambda a, b: -(-a // b),
    "floordiv": lambda a, b: a // b,
    "max": max,
    "min": min,
}
"""Functions that extents may use beside sums and products."""

_EXTREMES = ("max", "min")

MOST_EXCESSES = 4
"""Terms ``max(d, 0)`` of a sum up to which all cases are told apart."""

MOST_TRIED = 64
"""Sizes that are tried to tell whether a function of one size is linear."""


def canonical(extent: Extent) -> Extent:
    """Return the canonical form of an extent; raises ShapeError if it is no extent."""
    return extent if isinstance(extent, int) else _text(_polynomial(extent))


def product(extents: Iterable[Extent]) -> Extent:
    """Multiply extents."""
    factors = list(extents)
    if all(isinstance(factor, int) for factor in factors):
        return math.prod(int(factor) for factor in factors)
    result: _Polynomial = {(): 1}
    for factor in factors:
        result = _multiplied(result, _polynomial(factor))
    return _text(result)


def total(extents: Iterable[Extent]) -> Extent:
    """Add extents."""
    result: _Polynomial = {}
    for term in extents:
        result = _added(result, _polynomial(term))
    return _text(result)


def ceildiv(extent: Extent, divisor: Extent) -> Extent:
    """Divide, rounding up."""
    return _divided("ceildiv", extent, divisor)


def floordiv(extent: Extent, divisor: Extent) -> Extent:
    """Divide, rounding down."""
    return _divided("floordiv", extent, divisor)


def larger(a: Extent, b: Extent) -> Extent:
    """Return the larger of two extents."""
    return _text(_applied("max", _polynomial(a), _polynomial(b)))


def smaller(a: Extent, b: Extent) -> Extent:
    """Return the smaller of two extents."""
    return _text(_applied("min", _polynomial(a), _polynomial(b)))


def quotient(extent: Extent, divisor: Extent) -> Extent | None:
    """Divide one polynomial by another; None unless the division is exact."""
    rest, by = _polynomial(extent), _polynomial(divisor)
    if not by:
        return None
    found: _Polynomial = {}
    lead = max(by, key=_degree)
    while rest:
        first = max(rest, key=_degree)
        left = list(first)
        if rest[first] % by[lead] or any(left.count(atom) < lead.count(atom) for atom in lead):
            return None
        for atom in lead:
            left.remove(atom)
        term = {tuple(left): rest[first] // by[lead]}
        found = _added(found, term)
        rest = _added(rest, _multiplied({(): -1}, _multiplied(term, by)))
    return _text(found)


def only_adds(extent: Extent) -> bool:
    """Tell whether an extent has no negative term: then it is not negative, since sizes are not."""
    return all(factor >= 0 for factor in _polynomial(extent).values())


def _degree(monomial: _Monomial) -> tuple[int, _Monomial]:
    """Order monomials: by the number of factors, then by their names."""
    return len(monomial), monomial


def is_size_name(text: str) -> bool:
    """Tell whether a size can have this name."""
    return text.isascii() and text.isidentifier() and not iskeyword(text) and text not in FUNCTIONS


def size_names(extents: Iterable[object]) -> tuple[str, ...]:
    """Return the names of sizes in extents, as they first occur."""
    texts = (extent for extent in extents if isinstance(extent, str))
    names = dict.fromkeys(name for text in texts for name in _NAME.findall(text))
    return tuple(name for name in names if name not in FUNCTIONS)


def bind(extent: Extent, sizes: Mapping[str, Extent]) -> Extent:
    """Put numbers, or other extents, for the named sizes; names that ``sizes`` lacks stay symbolic."""
    if isinstance(extent, int):
        return extent
    result: _Polynomial = {}
    for monomial, factor in _polynomial(extent).items():
        result = _added(
            result, _polynomial(product([factor, *(_bind_atom(atom, sizes) for atom in monomial)]))
        )
    return _text(result)


def bind_shape(shape: Sequence[Extent], sizes: Mapping[str, Extent]) -> Shape:
    """Apply `bind` to each extent."""
    return tuple(bind(extent, sizes) for extent in shape)


def match_shape(pattern: Sequence[Extent], shape: Sequence[int], what: str, sizes: dict[str, int]) -> None:
    """Read named sizes off a shape and record them in ``sizes``.

    Raises ShapeError if the rank differs, a number differs, or a name already has another size.
    """
    if len(pattern) != len(shape):
        raise ShapeError(f"{what} must have shape {show_shape(pattern)}, got {show_shape(shape)}")
    for expected, actual in zip(pattern, shape, strict=True):
        if isinstance(expected, str) and expected.isidentifier():
            sizes.setdefault(expected, actual)
    for expected, actual in zip(pattern, shape, strict=True):
        bound = bind(expected, sizes)
        if isinstance(bound, int) and bound != actual:
            known = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise ShapeError(
                f"{what} must have shape {show_shape(pattern)}{f' with {known}' if known else ''},"
                f" got {show_shape(shape)}"
            )


def show_shape(shape: Sequence[Extent]) -> str:
    """Return ``[M, 4096]``."""
    return f"[{', '.join(map(str, shape))}]"


def _divided(name: str, extent: Extent, divisor: Extent) -> Extent:
    return _text(_applied(name, _polynomial(extent), _polynomial(divisor)))


def _applied(name: str, left: _Polynomial, right: _Polynomial) -> _Polynomial:
    return (_extreme if name in _EXTREMES else _quotient)(name, left, right)


def _extreme(name: str, left: _Polynomial, right: _Polynomial) -> _Polynomial:
    """Return the larger or the smaller one; known where the difference has one sign, since sizes do.

    Both are written with ``max(difference, 0)``, of a difference whose first term is positive, so that
    ``n - min(n, 5)`` and ``max(n - 5, 0)`` have one spelling.
    """
    difference = _added(left, _multiplied({(): -1}, right))
    least, most = _bounds(difference)
    if least is not None and least >= 0:
        return left if name == "max" else right
    if most is not None and most <= 0:
        return right if name == "max" else left
    if (line := _line(name, left, right)) is not None:
        return line
    if difference[max(difference, key=_degree)] < 0:
        left, right, difference = right, left, _multiplied({(): -1}, difference)
    excess: _Polynomial = {(f"max({_text(difference)}, 0)",): 1}
    return _added(right, excess) if name == "max" else _added(left, _multiplied({(): -1}, excess))


def _line(name: str, left: _Polynomial, right: _Polynomial) -> _Polynomial | None:
    """Return what the larger or smaller one is where both are made of one size and it is linear in that.

    Such functions have straight pieces, which meet at sizes up to twice the numbers that they add: if values
    at these and at two further ones lie on a line, all do. So ``max(2*s - 1 - max(s - 1, 0), 0)`` is s.
    """
    reach = [_numbers(value) for value in (left, right)]
    names = size_names([_text(left), _text(right)])
    excesses = any(_excess(monomial) is not None for value in (left, right) for monomial in value)
    if None in reach or len(names) != 1 or not excesses:
        return None
    count = 2 * sum(most for most in reach if most is not None) + 3
    if count > MOST_TRIED:
        return None
    values = [
        FUNCTIONS[name](*(int(bind(_text(value), {names[0]: size})) for value in (left, right)))
        for size in range(count)
    ]
    step = values[1] - values[0]
    if any(after - before != step for before, after in pairwise(values)):
        return None
    return _added({(): values[0]} if values[0] else {}, {(names[0],): step} if step else {})


def _numbers(value: _Polynomial) -> int | None:
    """Return the sum of the numbers that straight pieces of a polynomial add; None if it has other pieces."""
    found = 0
    for monomial, factor in value.items():
        above = _excess(monomial)
        inner = 1 if not monomial else 0 if _NAME.fullmatch(monomial[0]) else None
        inner = inner if above is None else _numbers(above)
        if inner is None or len(monomial) > 1:
            return None
        found += abs(factor) * inner
    return found


def _bounds(value: _Polynomial) -> tuple[int | None, int | None]:
    """Return the least and the largest number that a polynomial may be, None where there is no such bound.

    Sizes are not negative. What has a term ``max(d, 0)`` is the larger or the smaller one of what it is
    without it, and with ``d`` in its place. Else the tighter ones of two bounds hold, where there are both.
    """
    excesses = {monomial: above for monomial in value if (above := _excess(monomial)) is not None}
    for monomial, above in list(excesses.items())[: 1 if len(excesses) <= MOST_EXCESSES else 0]:
        factor = value[monomial]
        without = {other: times for other, times in value.items() if other != monomial}
        with_it = _added(without, _multiplied({(): factor}, above))
        (least, most), (other_least, other_most) = _bounds(without), _bounds(with_it)
        leasts, mosts = (least, other_least), (most, other_most)
        if factor > 0:
            return _tightest(max, leasts), None if None in mosts else _tightest(max, mosts)
        return None if None in leasts else _tightest(min, leasts), _tightest(min, mosts)
    exact, rational = _bounds_of_pairs(value), _bounds_of_fractions(value)
    return _tightest(max, (exact[0], rational[0])), _tightest(min, (exact[1], rational[1]))


def _tightest(function: Callable[..., int], bounds: Iterable[int | None]) -> int | None:
    """Return the largest or the smallest of the bounds that there are."""
    return function((bound for bound in bounds if bound is not None), default=None)


def _excess(monomial: _Monomial) -> _Polynomial | None:
    """Return d of a term ``max(d, 0)``, None for others."""
    if len(monomial) != 1 or not monomial[0].startswith("max("):
        return None
    call = ast.parse(monomial[0], mode="eval").body
    assert isinstance(call, ast.Call)  # what begins so
    return _polynomial(ast.unparse(call.args[0])) if ast.unparse(call.args[1]) == "0" else None


def _bounds_of_fractions(value: _Polynomial) -> tuple[int | None, int | None]:
    """Return bounds from what quotients by a number are at least and at most: off by less than 1."""
    least = most = Fraction(0)
    rest: dict[_Monomial, Fraction] = {}
    for monomial, factor in value.items():
        found = _divisions(monomial[0]) if len(monomial) == 1 and "(" in monomial[0] else None
        if found is None:
            rest[monomial] = rest.get(monomial, Fraction(0)) + factor
            continue
        name, dividend, by = found
        for inner, times in _polynomial(dividend).items():
            rest[inner] = rest.get(inner, Fraction(0)) + Fraction(factor * times, by)
        off = Fraction(factor * (by - 1) * (1 if name == "ceildiv" else -1), by)
        least, most = least + min(off, Fraction(0)), most + max(off, Fraction(0))
    number = rest.pop((), Fraction(0))
    return (
        math.ceil(number + least) if all(factor >= 0 for factor in rest.values()) else None,
        math.floor(number + most) if all(factor <= 0 for factor in rest.values()) else None,
    )


def _bounds_of_pairs(value: _Polynomial) -> tuple[int | None, int | None]:
    """Return bounds where quotients by one number, rounded alike, of dividends that are ``k`` apart meet.

    They differ by ``k`` over that number, rounded down or up.
    """
    rest = dict(value)
    least = most = rest.pop((), 0)
    for plus, minus in permutations([m for m in value if len(m) == 1 and "(" in m[0]], 2):
        if rest.get(plus, 0) <= 0 or rest.get(minus, 0) >= 0:
            continue
        apart = _apart(plus[0], minus[0])
        if apart is None:
            continue
        count = min(rest[plus], -rest[minus])
        least, most = least + count * apart[0], most + count * apart[1]
        rest[plus], rest[minus] = rest[plus] - count, rest[minus] + count
    return (
        least if all(factor >= 0 for factor in rest.values()) else None,
        most if all(factor <= 0 for factor in rest.values()) else None,
    )


def _apart(a: str, b: str) -> tuple[int, int] | None:
    """Return the bounds of the difference of two quotients, None where their dividends have none."""
    first, second = (_divisions(atom) for atom in (a, b))
    if first is None or second is None or first[0] != second[0] or first[2] != second[2]:
        return None
    difference = _added(_polynomial(first[1]), _multiplied({(): -1}, _polynomial(second[1])))
    if set(difference) - {()}:
        return None
    steps = difference.get((), 0)
    return steps // first[2], -(-steps // first[2])


def _divisions(atom: str) -> tuple[str, str, int] | None:
    """Return how a quotient by a number is rounded, its dividend and the number; None for other atoms."""
    call = ast.parse(atom, mode="eval").body
    assert isinstance(call, ast.Call)  # `_read` makes no other atoms but names
    assert isinstance(call.func, ast.Name)
    divisor = ast.unparse(call.args[1])
    known = call.func.id not in _EXTREMES and divisor.isdigit()
    return (call.func.id, ast.unparse(call.args[0]), int(divisor)) if known else None


def _quotient(name: str, dividend: _Polynomial, divisor: _Polynomial) -> _Polynomial:
    """Divide, in the one spelling that equal quotients by a number have."""
    if not set(divisor) <= {()}:
        return {(f"{name}({_text(dividend)}, {_text(divisor)})",): 1}
    by = divisor.get((), 0)
    if by < 1:
        raise ShapeError(f"cannot divide extent {_text(dividend)} into parts of {by}")
    return _quotient_by_number(name, dividend, by)


def _quotient_by_number(name: str, dividend: _Polynomial, by: int) -> _Polynomial:
    """Divide by a positive number.

    Multiples of it stand outside, so that factors inside are smaller; common factors are cancelled; what is
    divided twice is divided once. All three hold for either rounding.
    """
    outside = {monomial: factor // by for monomial, factor in dividend.items() if factor // by}
    inside = {monomial: factor % by for monomial, factor in dividend.items() if factor % by}
    number = inside.pop((), 0)
    if not inside:
        return _added(outside, _polynomial(FUNCTIONS[name](number, by)))
    common = math.gcd(by, *inside.values())
    inside, by = {monomial: factor // common for monomial, factor in inside.items()}, by // common
    rest = _added(inside, _polynomial(FUNCTIONS[name](number, common)))
    if common > 1:
        return _added(outside, _quotient_by_number(name, rest, by))
    nested = _nested(name, rest)
    if nested is not None:
        return _added(outside, _quotient_by_number(name, nested[0], nested[1] * by))
    return _added(outside, {(f"{name}({_text(rest)}, {by})",): 1})


def _nested(name: str, dividend: _Polynomial) -> tuple[_Polynomial, int] | None:
    """Return what is divided, and by which number, where a dividend is a quotient and a number."""
    atoms = [monomial for monomial in dividend if monomial]
    if len(atoms) != 1 or len(atoms[0]) != 1 or dividend[atoms[0]] != 1:
        return None
    if not atoms[0][0].startswith(f"{name}("):
        return None
    call = ast.parse(atoms[0][0], mode="eval").body
    assert isinstance(call, ast.Call)  # what begins so
    inner, by = (ast.unparse(argument) for argument in call.args)
    if not by.isdecimal():
        return None
    number = dividend.get((), 0) * int(by)
    return _added(_polynomial(inner), _polynomial(number)), int(by)


def _bind_atom(atom: str, sizes: Mapping[str, Extent]) -> Extent:
    if atom.isidentifier():
        return sizes.get(atom, atom)
    call = ast.parse(atom, mode="eval").body
    assert isinstance(call, ast.Call)  # `_read` makes no other atoms
    assert isinstance(call.func, ast.Name)
    left, right = (bind(ast.unparse(argument), sizes) for argument in call.args)
    return _divided(call.func.id, left, right)


def _polynomial(extent: Extent) -> _Polynomial:
    if isinstance(extent, int):
        return {(): int(extent)} if extent else {}
    return dict(_parsed(extent))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[tuple[_Monomial, int], ...]:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ShapeError(f"extent {text!r} is not an expression of sizes") from error
    return tuple(_read(tree, text).items())


def _read(tree: ast.expr, text: str) -> _Polynomial:
    match tree:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return _polynomial(value)
        case ast.Name(id=name) if is_size_name(name):
            return {(name,): 1}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _multiplied({(): -1}, _read(operand, text))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _added(_read(left, text), _read(right, text))
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _added(_read(left, text), _multiplied({(): -1}, _read(right, text)))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _multiplied(_read(left, text), _read(right, text))
        case ast.Call(func=ast.Name(id=name), args=[left, right]) if name in FUNCTIONS:
            return _applied(name, _read(left, text), _read(right, text))
    raise ShapeError(f"extent {text!r} may use names, integers, + - *, and {', '.join(FUNCTIONS)} of two")


def _added(left: _Polynomial, right: _Polynomial) -> _Polynomial:
    result = dict(left)
    for monomial, factor in right.items():
        result[monomial] = result.get(monomial, 0) + factor
    return {monomial: factor for monomial, factor in result.items() if factor}


def _multiplied(left: _Polynomial, right: _Polynomial) -> _Polynomial:
    result: _Polynomial = {}
    for a, x in left.items():
        for b, y in right.items():
            result = _added(result, {tuple(sorted(a + b)): x * y})
    return result


def _text(polynomial: _Polynomial) -> Extent:
    if set(polynomial) <= {()}:
        return polynomial.get((), 0)
    ordered = sorted(polynomial.items(), key=lambda item: (-len(item[0]), item[0]))
    text = ""
    for monomial, factor in ordered:
        size = abs(factor)
        term = "*".join(([str(size)] if size != 1 or not monomial else []) + list(monomial))
        sign = "-" if factor < 0 else "+"
        text += f" {sign} {term}" if text else (f"-{term}" if factor < 0 else term)
    return text
