"""Extents that a record leaves open, and what follows from them.

Where guards on the shape of a tensor have missed repeatedly, the next recording gives those extents
symbols (torch's `ShapeEnv`) and runs each operator on fake tensors beside the real ones. Extents of
results are then expressions of the symbols, which the guard computes; whatever torch had to decide
about symbols on the way (that two extents broadcast, that one is at least a window) becomes a line
of the guard. Anything that does not go through fixes the extents after all: nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import cache
from typing import Any

import torch

from ladder.capture.values.fakes import fake_in, quick_fake
from ladder.capture.values.kinds import is_a
from ladder.capture.values.remembered import Remembered
from ladder.runtime.dispatch import dispatch_kept

LEAST_OPEN = 2
"""Least extent that is left open: 0 (empty) and 1 (broadcast) have meanings of their own."""


OPEN_LIMIT = 1 << 24
"""Open extents are smaller than this: kernels compute indices with 32 bits."""


LONGEST_OPEN = 24
"""Most operations in the expression of an open extent: torch takes seconds to reason about a longer one."""


class DynamicSize(tuple[Any, ...]):
    """A `torch.Size` some of whose extents are `Dynamic`."""

    __slots__ = ()


class Growing:
    """The list of ``(*shape, n)`` while it is built: nothing else sees it, so it may hold `Dynamic`."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = list(items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Walk:
    """The iterator of a loop over a list or tuple, or a view of a dictionary, which only the loop sees.

    native: The iterator as the interpreter has it, which tells when there are no more items.
    """

    __slots__ = ("at", "names", "native", "source", "view")

    def __init__(self, source: Any, view: str = "") -> None:
        self.source = source
        self.view = view
        self.at = 0
        self.native = iter(getattr(source, view)() if view else source)
        self.names = iter(source)

    def step(self, items: Any, stop: Any) -> Any:
        """Return what comes next of `items`, which `source` holds now, or `stop`."""
        if next(self.native, stop) is stop:
            return stop
        self.at += 1
        if not self.view:
            return items[self.at - 1]
        key = next(self.names)
        return {"keys": key, "values": items[key], "items": (key, items[key])}[self.view]

    def rest(self, items: Any, stop: Any) -> list[Any]:
        """Return all that is to come, and take nothing of it."""
        ahead = copy(self)
        ahead.native, ahead.names = copy(self.native), copy(self.names)
        return [*iter(lambda: ahead.step(items, stop), stop)]

    def stands_alike(self) -> bool:
        """Say whether `standing` gives an iterator that goes on as this one."""
        if not self.view:
            return self.at <= len(self.source)
        try:
            return [*copy(self.names)] == [*self.source][self.at :]
        except RuntimeError:  # there are more keys now, or fewer
            return False


def standing(source: Any, view: str, at: int) -> Any:
    """Return an iterator over `source`, or a view of it, of which `at` items have been taken."""
    iterator = iter(getattr(source, view)() if view else source)
    for _ in range(at):
        next(iterator)
    return iterator


def may_be_left_open(tensor: torch.Tensor) -> bool:
    """Say whether extents of `tensor` may have symbols: it has fakes, its strides follow from its shape."""
    has_fakes = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return has_fakes and lies_in_rows(tensor)


def lies_in_rows(tensor: torch.Tensor) -> bool:
    """Say whether elements lie in the order of the axes, from the outermost on, with gaps or without."""
    if tensor.is_contiguous():
        return True
    least = 1
    for extent, step in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if extent != 1:
            if step < least:
                return False
            least = step * extent
    return True


def has_idle_axes(shape: torch.Size) -> bool:
    """Tell whether there are strides of such a tensor on which no place of an element depends."""
    return 1 in shape or 0 in shape


def idle_layout(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return how a tensor lies along axes of one element, or without any elements.

    That is whether its strides are those of a new tensor, and whether operators on images take it to have
    its channels last.
    """
    shape, steps = tensor.shape, tensor.stride()
    return steps == torch.empty(shape, device="meta").stride(), _has_channels_last(shape, steps)


def _has_channels_last(shape: torch.Size, steps: tuple[int, ...]) -> bool:
    """Tell whether torch takes a tensor for one whose channels lie last, by the rule that operators use."""
    if len(shape) not in (4, 5) or 0 in shape or not steps[1]:
        return False
    least = 0
    for axis in (1, *range(len(shape) - 1, 1, -1), 0):
        if steps[axis] < least or (axis == 0 and least == steps[1]):
            return False
        least = steps[axis] * shape[axis]
    return True


def liftable(value: Any, numbers: bool) -> bool:
    """Say whether a number may be left open: any where graphs take ``numbers``.

    Else fractions, of which operators take tensors, and what can be a symbol.
    """
    return type(value) is float or (type(value) is int and (numbers or value >= LEAST_OPEN))


@cache
def environment_class() -> Any:
    """Return torch's `ShapeEnv`, which does not look for the line of the program behind each symbol.

    For its own messages torch would; and import its exporter first, to know its own files from the program's.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return type("Environment", (ShapeEnv,), {"_get_user_frame": lambda self: None})


class Shapes:
    """The symbols of one segment.

    env, mode: torch's environment of symbols and mode of fake tensors; None as long as nothing is left open.
    names: Symbol -> variable of the guard; `values`: variable -> what it is in this run.
    given: Variable that an operator takes -> its symbol.
    fakes: Variable of a tensor with open extents -> its fake.
    quick: Id of a tensor -> it, and its fake where that need not share memory with others.
    extents: Expression of variables -> the variable of the guard that holds it.
    lengths: Expression of symbols -> how many operations it has.
    """

    def __init__(self) -> None:
        self.env: Any = None
        self.mode: Any = None
        self.remembered = Remembered()
        self.names: dict[Any, str] = {}
        self.values: dict[str, int] = {}
        self.quick: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.given: dict[str, Any] = {}
        self.fakes: dict[str, torch.Tensor] = {}
        self.extents: dict[str, str] = {}
        self.lengths: dict[Any, int] = {}

    def __bool__(self) -> bool:
        """Say whether anything is left open."""
        return self.env is not None

    def forget(self) -> None:
        """Leave nothing open any more."""
        self.env = self.mode = None
        for each in (self.names, self.values, self.given, self.fakes, self.quick):
            each.clear()

    def _begin(self) -> None:
        if self.env is None:
            from torch._subclasses.fake_tensor import FakeTensorMode

            # Equal extents are different symbols until something asks them to be equal.
            self.env = environment_class()(duck_shape=False)
            self.mode = FakeTensorMode(shape_env=self.env)
            self.mode.cache_enabled = False  # `remembered` knows what repeats
            self.remembered = Remembered()

    def lift(self, var: str, tensor: torch.Tensor, names: dict[int, str]) -> None:
        """Give variable `var`, a tensor, a fake whose extents `names` are symbols: variables of the guard.

        The fake is contiguous.
        """
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        self._begin()
        kinds = [DimDynamic.DYNAMIC if dim in names else DimDynamic.STATIC for dim in range(tensor.dim())]
        given = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        dense = torch.empty(tensor.shape, device="meta").stride()
        if given.stride() != dense:  # along axes of one element: symbols of their own
            given = given.detach().as_strided(given.shape, dense)
        fake: torch.Tensor = self.mode.from_tensor(
            alone(given),
            static_shapes=False,
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds),
            source=ConstantSource("_".join(names.values())),
        )
        torch._C._set_conj(fake, given.is_conj())
        torch._C._set_neg(fake, given.is_neg())
        for dim, name in names.items():
            extent: Any = fake.shape[dim]
            self.names[extent.node.expr] = name
            self.values[name] = tensor.shape[dim]
        self.fakes[var] = fake

    def number(self, value: float, name: str) -> Any:
        """Return the symbol of a whole number that is no extent of a tensor, but open as one; else None."""
        if type(value) is not int:
            return None
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        self._begin()
        source = ConstantSource(name)
        symbol = self.env.create_symbol(value, source, DimDynamic.DYNAMIC)
        self.names[symbol] = name
        self.values[name] = value
        return self.number_of(symbol)

    def number_of(self, symbol: Any) -> Any:
        """Return a symbol as the number that operators take."""
        from torch._dynamo.source import ConstantSource

        name = self.names[symbol]
        return self.env.create_symintnode(symbol, hint=self.values[name], source=ConstantSource(name))

    def settle(self, extents: Iterable[Any]) -> None:
        """Let extents be the numbers of this run, which the guard then asks for."""
        for extent in extents:
            int(extent)

    def settled(self) -> set[str]:
        """Return the variables of the guard that must be one number each."""
        known = self.env.replacements
        return {name for symbol, name in self.names.items() if symbol in known and known[symbol].is_number}

    def in_long_expressions(self, fakes: Any) -> list[Any]:
        """Return the open extents that the extents of `fakes` are too long expressions of."""
        extents = _open_extents(_tensors(fakes))
        long = [extent.node.expr for extent in extents if self._operations(extent.node.expr) > LONGEST_OPEN]
        symbols = {symbol for expression in long for symbol in expression.free_symbols}
        if not symbols:
            return []
        given = [number for number in self.given.values() if number is not None]
        return [item for item in (*_open_extents(self.fakes.values()), *given) if item.node.expr in symbols]

    def _operations(self, expression: Any) -> int:
        if expression not in self.lengths:
            self.lengths[expression] = expression.count_ops()
        return self.lengths[expression]

    def fake_of(self, var: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake of a tensor; without one its extents are what they are."""
        known = self.fakes.get(var)
        return self.closed_fake(tensor) if known is None else known

    def fake_alone(self, var: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what `fake_of` does, for a caller to whom it is nothing whether fakes share memory."""
        known = self.fakes.get(var)
        if known is None:
            kept = self.quick.get(id(tensor))
            known = kept[1] if kept is not None else quick_fake(self.mode, tensor)
            if known is None:
                return self.closed_fake(tensor)
            self.quick[id(tensor)] = tensor, known
        return known

    def closed_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake whose extents are those of `tensor`."""
        return fake_in(self.mode, tensor, static_shapes=True)

    def fakes_mode(self) -> Any:
        self._begin()
        return self.mode

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator on fakes; the state of random generators stays as it is."""
        return self.remembered(function, args, kwargs, lambda: self.run_once(function, args, kwargs))

    def run_once(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator on fakes, and do not remember what it gave."""
        from torch._dispatch.python import enable_python_dispatcher

        state = torch.get_rng_state()
        try:
            with (
                dispatch_kept(),
                self.mode,
                enable_python_dispatcher(),
            ):  # else operators read sizes as numbers
                return function(*args, **kwargs)
        finally:
            torch.set_rng_state(state)

    def laid_out_as(self, fake: Any, real: Any) -> Any:
        """Return fakes of the shapes of ``fake`` that lie as what an operator gave: dense, axes in any order.

        Which kernel of a library runs, and so how its result lies, fakes do not always know.
        """
        if is_a(real, tuple | list):
            return type(real)(self.laid_out_as(*pair) for pair in zip(fake, real, strict=True))
        if not is_a(real, torch.Tensor) or fake.dtype is not real.dtype or agrees(fake, real):
            return fake
        order = sorted(
            range(real.dim()), key=lambda axis: (real.stride(axis), real.shape[axis]), reverse=True
        )
        places = sorted(range(real.dim()), key=order.__getitem__)
        with self.mode:
            return fake.new_empty([fake.shape[axis] for axis in order]).permute(places)

    def text(self, expression: Any) -> str:
        """Return an expression of symbols as Python over the variables of the guard."""
        from sympy import Symbol  # type: ignore[import-untyped]
        from torch.utils._sympy.printers import PythonPrinter

        renamed = {symbol: Symbol(self.names[symbol], integer=True) for symbol in expression.free_symbols}
        return str(PythonPrinter().doprint(expression.xreplace(renamed)))

    def conditions(self) -> list[str]:
        """Return what the guard must check: all that was decided about symbols."""
        if not self:
            return []
        within = [f"{LEAST_OPEN} <= {name} < {OPEN_LIMIT}" for name in self.values]
        return [*within, *dict.fromkeys(self.text(guard.expr) for guard in self.env.guards)]


def _open_extents(fakes: Iterable[torch.Tensor]) -> list[Any]:
    return [extent for fake in fakes for extent in fake.shape if not is_fixed(extent)]


def _tensors(value: Any) -> list[torch.Tensor]:
    if is_a(value, tuple | list):
        return [found for item in value for found in _tensors(item)]
    return [value] if is_a(value, torch.Tensor) else []


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is no view, lies at the beginning of its memory and holds no gradient.

    Fakes of others have symbols for the extents of what they show or hold, and for where they begin.
    """
    holds = tensor.is_leaf and tensor.grad is not None
    if not (holds or tensor._is_view() or tensor.storage_offset()):
        return tensor
    with torch.no_grad():
        place = tensor.untyped_storage(), 0, tensor.shape, tensor.stride()
        found = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)
    return found.requires_grad_(tensor.requires_grad)


def is_open(tensor: torch.Tensor) -> bool:
    """Say whether shape or strides of a fake depend on symbols."""
    return any(not is_fixed(item) for item in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


def is_fixed(extent: Any) -> bool:
    """Say whether an extent is a number."""
    return is_a(extent, int) or bool(extent.node.expr.is_number)


def agrees(fake: Any, real: Any) -> bool:
    """Say whether fakes are, for the symbols' values, what the operator gave; strides along 1 say nothing."""
    if is_a(real, torch.Tensor):
        if fake.dtype is not real.dtype or len(fake.shape) != len(real.shape):
            return False
        strides = zip(real.shape, fake.stride(), real.stride(), strict=True)
        alike = all(_same(mine, theirs) for extent, mine, theirs in strides if extent != 1)
        return alike and all(map(_same, fake.shape, real.shape))
    if is_a(real, tuple | list):
        return len(fake) == len(real) and all(map(agrees, fake, real))
    return real is None and fake is None


def _same(extent: Any, value: int) -> bool:
    return (int(extent) if is_fixed(extent) else extent.node.hint) == value


class Differing:
    """Says which extents of a guard's tensors are not those that were recorded."""

    def __init__(self, paths: list[str], tensors: list[torch.Tensor]) -> None:
        self.paths = paths
        self.shapes = [tuple(item.shape) for item in tensors]
        self.strides = [item.stride() if item.layout is torch.strided else () for item in tensors]
        self.kinds = [(item.dtype, item.device) for item in tensors]

    def __call__(self, *tensors: Any) -> tuple[str, ...]:
        """Return their paths, and those of the strides of what only lies otherwise.

        None if something else differs too.
        """
        found: list[str] = []
        rows = zip(self.paths, self.shapes, self.strides, self.kinds, tensors, strict=True)
        for path, shape, stride, kind, tensor in rows:
            if not is_a(tensor, torch.Tensor) or (tensor.dtype, tensor.device) != kind:
                return ()
            if tensor.dim() != len(shape):
                return ()
            extents = enumerate(zip(shape, tensor.shape, strict=True))
            differing = [extent_path(path, dim) for dim, (old, new) in extents if old != new]
            found += differing if differing or tensor.stride() == stride else [strides_path(path)]
        return tuple(found)


def strides_path(path: str) -> str:
    """Return the path by which it is known how a tensor lies."""
    return f"{path}.stride()"


def extent_path(path: str, dim: int) -> str:
    """Return the path by which the extent of a tensor is known."""
    return f"{path}.shape[{dim}]"
