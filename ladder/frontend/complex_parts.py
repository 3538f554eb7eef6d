"""Complex numbers of a graph as two values of it: what is computed of them stays within kernels.

Each operator that gives complex numbers is a call of torch all the same, which is left out where nothing
reads it; what gives reals is made of the parts. Products are as torch's GPUs form them, a real factor being
a complex one with 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ladder.frontend.aten_rows import ROWS
from ladder.frontend.fx_nodes import first_result, is_open, size_of, tensors_around, type_and_shape
from ladder.frontend.importer import Importer
from tile_types.library import get_type
from tile_types.tile import Tile

if TYPE_CHECKING:
    from ladder.frontend.torch_fx import _Walk

Pair = tuple[str, str]
"""The real and the imaginary parts."""

PARTS = {torch.complex64: "float32", torch.complex128: "float64"}
"""Type of complex numbers -> that of their parts."""


def _product(im: Importer, wide: str, a: Pair, b: Pair) -> Pair:
    def times(x: str, y: str) -> str:
        return im.apply("mul", [x, y], wide)

    real = im.apply("sub", [times(a[0], b[0]), times(a[1], b[1])], wide)
    return real, im.apply("add", [times(a[0], b[1]), times(a[1], b[0])], wide)


def _by_part(operator: str) -> Callable[..., Pair]:
    """Return what applies an operator to the real parts, and to the imaginary ones."""

    def made(im: Importer, wide: str, *pairs: Pair) -> Pair:
        real, imaginary = (im.apply(operator, parts, wide) for parts in zip(*pairs, strict=True))
        return real, imaginary

    return made


def _total(operator: str) -> Callable[..., Pair]:
    """Return what adds, or subtracts, once the second operand, as torch does: by a complex factor of 1."""

    def made(im: Importer, wide: str, a: Pair, b: Pair) -> Pair:
        once = im.number(1.0, wide), im.number(0.0, wide)
        return _by_part(operator)(im, wide, a, _product(im, wide, once, b))

    return made


def _conjugate(im: Importer, wide: str, a: Pair) -> Pair:
    return a[0], im.apply("neg", [a[1]], wide)


def _of_angle(im: Importer, wide: str, size: Pair, angle: Pair) -> Pair:
    turned = (im.apply(name, [angle[0]], wide) for name in ("cos", "sin"))
    real, imaginary = (im.apply("mul", [size[0], part], wide) for part in turned)
    return real, imaginary


COMPUTED: Mapping[str, Callable[..., Pair]] = {
    "complex.default": lambda im, wide, a, b: (a[0], b[0]),
    "polar.default": _of_angle,
    "mul.Tensor": _product,
    "add.Tensor": _total("add"),
    "sub.Tensor": _total("sub"),
    "neg.default": _by_part("neg"),
    "_conj.default": _conjugate,
    "_conj_physical.default": _conjugate,
}
"""Operators of complex results, and of real and complex operands."""

MOVED = (
    *("clone.default", "alias.default", "view.default", "reshape.default", "_unsafe_view.default"),
    *("unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "permute.default", "t.default"),
    *("transpose.int", "expand.default", "slice.Tensor", "select.int", "flip.default", "roll.default"),
)
"""Operators that move elements of one operand: parts are moved alike."""


def _beside(im: Importer, out: str, a: Pair) -> str:
    apart = [im.reshape(part, (*im.shape(part), 1)) for part in a]
    return im.g.add("concat", *apart, axis=len(im.shape(apart[0])) - 1)


REAL: Mapping[str, Callable[[Importer, str, Pair], Any]] = {
    "view_as_real.default": _beside,
    "abs.default": lambda im, out, a: ROWS["hypot.default"](im, out, *a),
    "angle.default": lambda im, out, a: ROWS["atan2.default"](im, out, a[1], a[0]),
}
"""Operators of complex operands and of real results."""


BY_TORCH = ("view_as_real.default", "polar.default")
"""Operators that torch computes on CPUs: by vectors, where our kernels go element by element."""


class ComplexParts:
    """The parts of the complex numbers that a walk has met."""

    def __init__(self, walk: _Walk) -> None:
        self.walk = walk
        self.pairs: dict[torch.fx.Node, Pair | None] = {}

    def called(self, node: torch.fx.Node, name: str) -> Any:
        """Return what a node gives that has no row: real numbers of complex ones, else a call of torch."""
        kinds = {value.dtype for value in tensors_around(node)}
        if not kinds & PARTS.keys() or is_open(node) or not str(node.target).startswith("aten."):
            return self.walk.call(node)
        self.walk.im.on_cpu = first_result(node).device.type == "cpu"
        by_torch = self.walk.im.on_cpu and name in BY_TORCH
        if name in REAL and not by_torch and (pair := self.of(node.args[0])) is not None:
            found = REAL[name](self.walk.im, type_and_shape(node.meta["val"])[0], pair)
            if found is not None:
                return found
        made = self.walk.call(node)
        if by_torch:
            return made
        if (name in COMPUTED and not node.kwargs) or name in MOVED:
            self.pairs[node] = self._made(node, name)
        elif name == "view_as_complex.default":
            self.pairs[node] = self._split(self.walk.values[node.args[0]])  # type: ignore[index]
        return made

    def _made(self, node: torch.fx.Node, name: str) -> Pair | None:
        """Return the parts of what an operator gives; None if those of an operand are not known."""
        im, wide = self.walk.im, PARTS.get(node.meta["val"].dtype)
        if wide is None:
            return None
        im.stated = shape = tuple(map(size_of, node.meta["val"].shape))
        if name in COMPUTED:
            pairs = [self.of(value, wide) for value in node.args]
            if None in pairs:
                return None
            real, imaginary = (im.expand(part, shape) for part in COMPUTED[name](im, wide, *pairs))
            return real, imaginary
        pair, rest = self.of(node.args[0], wide), [self.walk.argument(value) for value in node.args[1:]]
        if pair is None:
            return None
        if name == "clone.default":
            return pair
        real, imaginary = (ROWS[name](im, wide, part, *rest) for part in pair)
        return None if real is None else (real, imaginary)

    def of(self, value: Any, wide: str = "") -> Pair | None:
        """Return the parts of an operand, of 0 beside reals; None if they are not in reach."""
        im = self.walk.im
        if not isinstance(value, torch.fx.Node):
            number = complex(value)
            return im.number(number.real, wide), im.number(number.imag, wide)
        held = value.meta.get("val")
        if not isinstance(held, torch.Tensor):
            return None
        if not held.is_complex():
            name = self.walk.values[value]
            return im.cast(name, wide), im.number(0.0, wide)
        if value not in self.pairs:
            self.pairs[value] = self._read(value, held)
        pair = self.pairs[value]
        return pair if pair is None or not wide else (im.cast(pair[0], wide), im.cast(pair[1], wide))

    def _read(self, value: torch.fx.Node, held: torch.Tensor) -> Pair | None:
        """Return the parts of complex numbers that lie in memory."""
        if held.dtype not in PARTS or held.is_conj() or not held.is_contiguous():
            return None
        _, shape = type_and_shape(held)
        tile = Tile(get_type(PARTS[held.dtype]), (*shape, 2))
        name = self.walk.values[value]
        call = self.walk.im.call("aten.view_as_real.default", (("%", 0),), (), [name], [tile])
        return self._split(call.name)

    def _split(self, value: str) -> Pair:
        """Return the two parts of numbers of which the last axis has the parts."""
        im, shape = self.walk.im, self.walk.im.shape(value)[:-1]
        real, imaginary = (im.reshape(im.take_axis(value, -1, at, 1), shape) for at in (0, 1))
        return real, imaginary
