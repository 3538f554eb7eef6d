"""Pairs that are equal over the reals and not on computers, and pairs that are equal at all extents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from superopt_programs import Body, Pair, Value, program

from ladder.ir import Graph, GraphBuilder

F32 = "float32"
SHAPE = (2, 3)


def typed(body: Body, types: dict[str, str], shape: tuple[int, ...] = SHAPE) -> Graph:
    """Return the kernel graph of a function of values of several types."""
    g = GraphBuilder("typed")
    results = body(*(Value(g, g.input(name, ttype, shape)) for name, ttype in types.items()))
    results = results if isinstance(results, tuple) else (results,)
    return g.finish(*(result.name for result in results))


def to(x: Value, ttype: str) -> Value:
    return x.op("convert", type=ttype)


# ---- near misses -----------------------------------------------------------------------------------------
CONTEXTS: dict[str, Callable[[Value, Value], Value]] = {
    "alone": lambda y, w: y + w * 0.0,
    "scaled": lambda y, w: y * w + w,
    "summed": lambda y, w: (y * w).sum(1),
    "squared": lambda y, w: y.square() + w,
    "under exp": lambda y, w: y.exp() * w,
}

NARROW = ("float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "uint8", "int32", "bool")


def conversions() -> Iterator[Pair]:
    """Yield what loses a conversion that rounds, saturates or overflows, or swaps it for another."""
    types = {"x": F32, "w": F32}
    for label, wrap in CONTEXTS.items():
        plain = typed(lambda x, w, wrap=wrap: wrap(x * 1.0, w), types)
        rounded = {
            name: typed(lambda x, w, name=name, wrap=wrap: wrap(to(to(x, name), F32), w), types)
            for name in NARROW
        }
        for name, graph in rounded.items():
            yield Pair(f"{name} dropped, {label}", graph, plain)
            yield Pair(f"{name} added, {label}", plain, graph)
        for one, other in pairwise(NARROW):
            yield Pair(f"{one} for {other}, {label}", rounded[one], rounded[other])


ROUNDING = ("round", "floor", "abs", "relu", "gelu", "gelu_tanh", "erf", "sin", "cos")


def functions() -> Iterator[Pair]:
    """Yield what takes a function for linear, or for another."""
    types = {"x": F32, "w": F32}
    for label, wrap in CONTEXTS.items():
        for name in ROUNDING:
            graph = typed(lambda x, w, name=name, wrap=wrap: wrap(x.op(name), w), types)
            misses: dict[str, Body] = {
                "dropped": lambda x, w: x * 1.0,
                "of the negative": lambda x, w, name=name: -((-x).op(name)) + (x - x),
                "shifted": lambda x, w, name=name: (x + 1.0).op(name) - 1.0,
                "of a sum": lambda x, w, name=name: (x + w).op(name) - w.op(name),
            }
            if name in ("sin", "erf", "round") or (name == "abs" and label == "squared"):
                del misses["of the negative"]  # odd functions, or equal squares
            if name in ("round", "floor"):
                del misses["shifted"]
            for what, body in misses.items():
                other = typed(lambda x, w, body=body, wrap=wrap: wrap(body(x, w), w), types)
                yield Pair(f"{name} {what}, {label}", graph, other)


def _sum(a, b):
    return a + b


def _product(a, b):
    return a * b


def _difference(a, b):
    return a - b


def _square(a, b):
    return a.square() + b


WRAPPING = {"add": _sum, "mul": _product, "sub": _difference, "square": _square}


def integers() -> Iterator[Pair]:
    """Yield what takes integers, which wrap around, for numbers."""
    for name in ("int8", "uint8", "int32"):
        for wide in (F32, "float16", "int64", "float64"):
            for what, body in WRAPPING.items():
                types = {"a": name, "b": name}
                within = typed(lambda a, b, body=body, wide=wide: to(body(a, b), wide), types)
                outside = typed(lambda a, b, body=body, wide=wide: body(to(a, wide), to(b, wide)), types)
                yield Pair(f"{what} of {name} before {wide}", within, outside)
                yield Pair(f"{what} of {name} after {wide}", outside, within)
        for what in ("maximum", "minimum"):
            moved = typed(lambda a, b, what=what: (a + b).op(what, b + b) - b, {"a": name, "b": name})
            plain = typed(lambda a, b, what=what: a.op(what, b), {"a": name, "b": name})
            yield Pair(f"{what} of {name} shifted", plain, moved)
    for name in ("int32", "int64"):
        types = {"a": name, "b": name}
        back = typed(lambda a, b, name=name: to(to(a, F32), name) + b, types)
        yield Pair(f"{name} by way of float32", typed(lambda a, b: a + b, types), back)


DOMAINS: dict[str, tuple[Body, Body]] = {
    "times y over y": (lambda x, y: x * 1.0, lambda x, y: (x * y) / y),
    "x over x": (lambda x, y: x - x + 1.0, lambda x, y: x / x),
    "two roots": (lambda x, y: (x * y).sqrt(), lambda x, y: x.sqrt() * y.sqrt()),
    "root of a square": (lambda x, y: x * 1.0, lambda x, y: x.square().sqrt()),
    "square of a root": (lambda x, y: x * 1.0, lambda x, y: x.sqrt().square()),
    "exp of log": (lambda x, y: x * 1.0, lambda x, y: x.op("log").exp()),
    "log of a product": (lambda x, y: (x * y).op("log"), lambda x, y: x.op("log") + y.op("log")),
    "logs of a quotient": (lambda x, y: (x / y).op("log"), lambda x, y: x.op("log") - y.op("log")),
    "fraction of a difference": (
        lambda x, y: x + y, lambda x, y: (x.square() - y.square()) / (x - y),
    ),
    "root by its square": (lambda x, y: x.square().sum(1).sqrt(), lambda x, y: _norm(x).square() / _norm(x)),
    "reciprocal of a reciprocal": (lambda x, y: x * 1.0, lambda x, y: 1.0 / (1.0 / x)),
    "rms of a scaled row": (lambda x, y: x / _norm(x), lambda x, y: (x * y) / _norm(x * y)),
    "rms without its sign": (lambda x, y: x / _norm(x), lambda x, y: (x * -2.0) / _norm(x * -2.0)),
    "root of a negative scale": (lambda x, y: _norm(x) * -3.0, lambda x, y: _norm(x * -3.0)),
    "root of a sum of roots": (lambda x, y: (x.square() + y.square()).sqrt(), lambda x, y: _abs(x) + _abs(y)),
    "normalised twice": (
        lambda x, y: x / (_norm(x) + 1.0), lambda x, y: (x / _norm(x)) * (_norm(x) / (_norm(x) + 1.0)),
    ),
}  # fmt: skip


def _norm(x: Value) -> Value:
    return x.square().sum(1).sqrt()


def _abs(x: Value) -> Value:
    return x.square().sqrt()


def domains() -> Iterator[Pair]:
    """Yield what is undefined, or of another sign, where the original is not."""
    wraps: dict[str, Callable[[Value], Value]] = {
        "alone": lambda v: v, "scaled": lambda v: v * 0.5, "negative": lambda v: -v,
        "squared and more": lambda v: v.square() + v, "under a sum": lambda v: v.sum(1),
    }  # fmt: skip
    for what, (left, right) in DOMAINS.items():
        for label, wrap in wraps.items():
            pair = [
                typed(lambda x, y, body=body, wrap=wrap: wrap(body(x, y) + y * 0.0), {"x": F32, "y": F32})
                for body in (left, right)
            ]
            yield Pair(f"{what}, {label}", *pair)


def _mean(x: Value) -> Value:
    return x.sum(1) * (1 / 16)


def _variance(x: Value) -> Value:
    return (x - _mean(x)).square().sum(1) * (1 / 16)


def _one_pass(x: Value) -> Value:
    return x.square().sum(1) * (1 / 16) - _mean(x).square()


def _softmax(x: Value) -> Value:
    return x.exp() / x.exp().sum(1)


UNSTABLE: dict[str, tuple[Body, Body]] = {
    "one-pass variance": (lambda x, y: _variance(x) + y, lambda x, y: _one_pass(x) + y),
    "one-pass norm": (
        lambda x, y: (x - _mean(x)) / (_variance(x) + 1e-5).sqrt() * y,
        lambda x, y: (x - _mean(x)) / (_one_pass(x) + 1e-5).sqrt() * y,
    ),
    "expanded squared distance": (
        lambda x, y: (x - y).square().sum(1), lambda x, y: (x.square() - 2.0 * x * y + y.square()).sum(1),
    ),
    "squared distance by norms": (
        lambda x, y: (x - y).square().sum(1),
        lambda x, y: x.square().sum(1) + y.square().sum(1) + (x * y).sum(1) * -2.0,
    ),
    "difference of squares": (lambda x, y: (x + y) * (x - y), lambda x, y: x.square() - y.square()),
    "distributed": (lambda x, y: x * (x - y), lambda x, y: x.square() - x * y),
    "centred after the product": (
        lambda x, y: ((x - _mean(x)) * y).sum(1), lambda x, y: (x * y).sum(1) - _mean(x) * y.sum(1),
    ),
    "sigmoid by its complement": (lambda x, y: x.sigmoid() * y, lambda x, y: (1.0 - (-x).sigmoid()) * y),
    "tanh by exponentials": (
        lambda x, y: x.tanh() * y, lambda x, y: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()) * y,
    ),
    "sigmoid by exponentials": (lambda x, y: x.sigmoid() * y, lambda x, y: x.exp() / (1.0 + x.exp()) * y),
    "softmax without its maximum": (
        lambda x, y: _softmax(x - x.op("reduce_max", axis=1)) * y, lambda x, y: _softmax(x) * y,
    ),
    "added and taken away": (lambda x, y: x + 0.0 * y, lambda x, y: (x + y) - y),
    "fraction of a difference": (lambda x, y: (x - y) / y, lambda x, y: x / y - 1.0),
    "divided by a square": (lambda x, y: x / y / y, lambda x, y: x / (y * y)),
    "quotients by squares": (
        lambda x, y: (x / y).sum(1).op("maximum", y),
        lambda x, y: ((x * y) / y.square()).sum(1).op("maximum", y),
    ),
    "exponential of a difference": (lambda x, y: (x - y).exp(), lambda x, y: x.exp() / y.exp()),
}  # fmt: skip
"""Equal wherever both are defined; the second loses what the first keeps."""


def unstable() -> Iterator[Pair]:
    for what, (left, right) in UNSTABLE.items():
        yield Pair(what, *(typed(body, {"x": F32, "y": F32}, (4, 16)) for body in (left, right)))


def computer_near_misses() -> Iterator[Pair]:
    """Yield all pairs of which the second must not replace the first."""
    for family in (conversions, functions, integers, domains, unstable):
        yield from family()


# ---- true rewritings -------------------------------------------------------------------------------------
C = 1 / 64


def _relu(x: Value) -> Value:
    return x.op("relu")


def _gelu(x: Value) -> Value:
    return x.op("gelu")


def _ss(x: Value) -> Value:
    return x.square().sum(1)


def _rms(x: Value, epsilon: float = 0.0) -> Value:
    mean = _ss(x) * C
    return (mean + epsilon if epsilon else mean).sqrt()


def _eps(x: Value) -> Value:
    return _rms(x, 1e-6)


def _centred(x: Value) -> Value:
    return x - x.sum(1) * C


def _deviation(x: Value) -> Value:
    return (_ss(_centred(x)) * C + 1e-5).sqrt()


def _layer_norm(x: Value) -> Value:
    return _centred(x) / _deviation(x)


X: dict[str, tuple[Any, ...]] = {"x": ("m", "k")}
XY = {**X, "y": ("m", "k")}
XW = {**X, "w": ("k", "n")}
XWU = {**XW, "u": ("k", "n")}
XWV = {**XW, "v": ("n", "o")}

TRUE: dict[str, tuple[dict[str, tuple[Any, ...]], Body, Body]] = {
    "cosine by one root": (
        XY, lambda x, y: (x * y).sum(1) / (_ss(x).sqrt() * _ss(y).sqrt()),
        lambda x, y: (x * y).sum(1) / (_ss(x) * _ss(y)).sqrt(),
    ),
    "root of a product": (
        XY, lambda x, y: (_ss(x) * _ss(y)).sqrt(), lambda x, y: _ss(x).sqrt() * _ss(y).sqrt(),
    ),
    "root of a quotient": (
        XY, lambda x, y: _ss(x).sqrt() / _ss(y).sqrt(), lambda x, y: (_ss(x) / _ss(y)).sqrt(),
    ),
    "rms of 2 x": (X, lambda x: (x * 2.0) / _rms(x * 2.0), lambda x: x / _rms(x)),
    "rms of 0.1 x": (X, lambda x: (x * 0.1) / _rms(x * 0.1), lambda x: x / _rms(x)),
    "rms of 5 x, product": (XW, lambda x, w: ((x * 5.0) / _rms(x * 5.0)) @ w, lambda x, w: (x @ w) / _rms(x)),
    "rms by a sum": (X, lambda x: x / _rms(x), lambda x: x * 8.0 / _ss(x).sqrt()),
    "norm by a reciprocal's root": (X, lambda x: x / _ss(x).sqrt(), lambda x: x * (1.0 / _ss(x)).sqrt()),
    "square of a root": (X, lambda x: _eps(x) * _eps(x), lambda x: _ss(x) * C + 1e-6),
    "relu, weights added": (XW, lambda x, w: _relu(x) @ w + _relu(x) @ w, lambda x, w: _relu(x) @ (w + w)),
    "relu MLP": (XWV, lambda x, w, v: _relu(x @ w) @ v, lambda x, w, v: (_relu(x @ w) * 2.0) @ (v * 0.5)),
    "relu after rms": (XW, lambda x, w: _relu((x / _eps(x)) @ w), lambda x, w: _relu((x @ w) / _eps(x))),
    "relu of both signs": (X, lambda x: _relu(x) - _relu(-x), lambda x: x * 1.0),
    "relu of a sum": (XW, lambda x, w: _relu(x @ w + x @ w), lambda x, w: _relu(x @ (w * 2.0))),
    "relu by maximum": (X, lambda x: _relu(x), lambda x: x.op("maximum", 0.0)),
    "relu MLP with bias": (
        {**XWV, "b": (1, "n")}, lambda x, w, v, b: _relu(x @ w + b) @ v,
        lambda x, w, v, b: _relu(b + x @ w) @ v,
    ),
    "gelu MLP": (XWV, lambda x, w, v: _gelu(x @ w) @ v, lambda x, w, v: (_gelu(x @ w) @ (v * 2.0)) * 0.5),
    "gelu gate": (XWU, lambda x, w, u: _gelu(x @ w) * (x @ u), lambda x, w, u: (x @ u) * _gelu(x @ w)),
    "gelu by erf": (X, lambda x: _gelu(x), lambda x: x * 0.5 * (1.0 + (x * (1 / 2**0.5)).op("erf"))),
    "gelu after rms": (XW, lambda x, w: _gelu((x / _eps(x)) @ w), lambda x, w: _gelu((x @ w) / _eps(x))),
    "gelu, weights added": (
        XWV, lambda x, w, v: _gelu(x @ w) @ v + _gelu(x @ w) @ v, lambda x, w, v: _gelu(x @ w) @ (v + v),
    ),
    "layer_norm @ w": (XW, lambda x, w: _layer_norm(x) @ w, lambda x, w: (_centred(x) @ w) / _deviation(x)),
    "layer_norm @ w, mean apart": (
        XW, lambda x, w: _layer_norm(x) @ w,
        lambda x, w: (x @ w - x.sum(1) * C * w.sum(0)) / _deviation(x),
    ),
    "layer_norm by rsqrt": (
        XW, lambda x, w: _layer_norm(x) @ w,
        lambda x, w: (_centred(x) * (_ss(_centred(x)) * C + 1e-5).rsqrt()) @ w,
    ),
    "layer_norm with gain": (
        {**XW, "g": (1, "k")}, lambda x, w, g: (_layer_norm(x) * g) @ w,
        lambda x, w, g: _layer_norm(x) @ (g.T * w),
    ),
    "layer_norm into gelu": (
        XW, lambda x, w: _gelu(_layer_norm(x) @ w), lambda x, w: _gelu((_centred(x) @ w) / _deviation(x)),
    ),
    "silu MLP": (XWV, lambda x, w, v: (x @ w).silu() @ v, lambda x, w, v: ((x @ w) * (x @ w).sigmoid()) @ v),
    "silu MLP after rms": (
        XWV, lambda x, w, v: ((x / _eps(x)) @ w).silu() @ v, lambda x, w, v: ((x @ w) / _eps(x)).silu() @ v,
    ),
    "gated MLP with its last product": (
        {**XWU, "v": ("n", "o")}, lambda x, w, u, v: ((x @ w).silu() * (x @ u)) @ v,
        lambda x, w, u, v: ((x @ u) * (x @ w) * (x @ w).sigmoid()) @ v,
    ),
    "tanh MLP": (
        XWV, lambda x, w, v: (x @ w).tanh() @ v,
        lambda x, w, v: ((x @ w) * 2.0).sigmoid() @ (v * 2.0) - v.sum(0),
    ),
    "exp MLP": (XWV, lambda x, w, v: (x @ w).exp() @ v, lambda x, w, v: ((x @ w).exp() @ (v * 4.0)) * 0.25),
    "log of 1 + exp": (
        X, lambda x: (x.exp() + 1.0).op("log") * 2.0,
        lambda x: (1.0 + x.exp()).op("log") + (1.0 + x.exp()).op("log"),
    ),
    "softmax past a product": (
        {"x": ("m", "k"), "v": ("k", "n")}, lambda x, v: _softmax(x) @ v,
        lambda x, v: (x.exp() @ v) / x.exp().sum(1),
    ),
    "softmax of a scaled row": (
        X, lambda x: _softmax(x * 2.0), lambda x: _softmax(x + x),
    ),
}  # fmt: skip
"""Name -> shapes by symbols, the original, and what may replace it at all extents."""


def true_rewritings() -> Iterator[Pair]:
    for name, (shapes, left, right) in TRUE.items():
        yield Pair(name, program(left, shapes), program(right, shapes))
