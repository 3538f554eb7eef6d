"""What classes, properties, `super` and modules give where they are used in seldom ways."""

from __future__ import annotations

import collections
import contextlib
import copy
import types
import typing
import warnings

import torch
from capture_world import calls, normal, programs_of
from programs_thrown import ends_recording
from torch import nn


class ClassProperty(property):
    """Gives of the class what `property` gives of an object."""

    def __get__(self, value, owner=None):
        return self.fget(owner)


class Sized:
    @ClassProperty
    def size(cls):  # noqa: N805
        return cls.width * 3

    width = 2
    silent = property(doc="nothing reads it")


class Wider(Sized):
    width = 5


def _class_properties():
    def fn(x):
        return x * Sized.size + Wider().size, Wider.size

    return calls(fn, *[lambda: (normal(3),)] * 3)


def _properties_without_functions():
    def fn(x, k):
        sized = Sized()
        if k == 0:
            return x + 1, sized.silent
        if k == 1:
            sized.silent = x
        if k == 2:
            del sized.silent
        return x * 2, Sized.silent.__doc__

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 2, 3, 0, 3)])


class Shape:
    """Its own `__new__` chooses another class, whose `__init__` is then called."""

    def __new__(cls, side, *rest, **named):
        if side == 0:
            return "no shape"
        return object.__new__(Circle if side < 0 else cls)


class Circle(Shape):
    def __init__(self, side, *rest, **named):
        self.side, self.rest, self.named = -side, rest, named


class Wrong(Circle):
    def __init__(self, side):
        return side


class Raises(Circle):
    def __init__(self, side):
        self.side = 1 / (side - 1)


def _objects_of_other_classes():
    def fn(x, k):
        if k == 0:
            circle = Shape(-3, 1, unit="m")
            return x * circle.side, type(circle).__name__, circle.rest, circle.named
        if k == 1:
            return x + 1, Shape(0), Circle(0), type(Shape(2)).__name__
        if k == 2:
            return Wrong(3)
        if k == 3:
            return Raises(1)
        return Circle()

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 2, 3, 4, 0, 1)])


CELL = types.CellType(3)


class Base:
    def plain(self):
        return super().__init__

    def held(self):
        def inner():
            return self

        return super().__self__ is inner()

    def gone(self):
        del self
        return super()

    def gone_from_cell(self):
        def inner():
            return self

        del self
        return super(), inner

    def many(*every):
        return super()

    def named(*, self):
        return super()


def free(self):
    return super()


def _super_without_arguments():
    def fn(x, k):
        base, y = Base(), x * 2
        if k == 0:
            return y, base.held()
        if k == 1:
            return Base.plain(CELL)
        if k == 2:
            return base.gone()
        if k == 3:
            return base.gone_from_cell()
        if k == 4:
            return base.many()
        if k == 5:
            return Base.named(self=base)
        return free(base)

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 2, 3, 4, 5, 6, 0, 1)])


def names_of_variables(x, scale):
    def inner():
        return scale

    return dir(), sorted(vars()), inner()


def _names_of_variables():
    def fn(x):
        return x * 2, names_of_variables(x, 3)

    return calls(fn, *[lambda: (normal(3),)] * 3)


def _natives_that_look_at_frames():
    """Natives that ask which code calls them find the program's also where recording has ended."""

    def fn(x):
        ends_recording()
        globals()["noted"] = x.dim()
        made = collections.namedtuple("Made", "first"), typing.NewType("New", int)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            warnings.warn("told", stacklevel=1)
        return x * noted, [kind.__module__ for kind in made], told[0].filename, told[0].lineno  # noqa: F821

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: globals().pop("noted", None))


def _modules_without_a_name():
    bare = types.ModuleType("bare")
    bare.width = 3
    del bare.__name__

    def fn(x):
        made = types.ModuleType.__new__(types.ModuleType)
        made.width = bare.width
        return x * made.width

    return calls(fn, *[lambda: (normal(3),)] * 2)


class Layers(nn.ModuleList):
    def __getitem__(self, at):
        return [*self._modules.values()][at]


Layers.__getitem__.__module__ = None


def _functions_of_no_module():
    layers = Layers([nn.ReLU(), nn.Tanh()])

    def fn(x):
        for layer in reversed(layers):
            x = layer(x)
        return x

    return calls(fn, *[lambda: (normal(3),)] * 2)


class Degrees(float):
    """What a pattern takes whole, as it does a number."""


class Pair:
    __match_args__ = ("first", "second")

    def __init__(self, first, second):
        self.first, self.second = first, second


class Listed(Pair):
    __match_args__ = ["first"]


class Numbered(Pair):
    __match_args__ = (1,)


def _subscripted_classes_made_in_the_call():
    def fn(x):
        group = collections.namedtuple("Group", "key items")
        typed = group[int]
        made = typed(1, [x])
        return x + 1, type(made) is group, typed.__origin__ is group, list[group].__args__[0] is group

    return calls(fn, *[lambda: (normal(3),)] * 3)


class Sole:
    """There is one, which says so by its name."""

    def __reduce_ex__(self, protocol):
        return "SOLE"


SOLE = Sole()


def _copies_that_are_no_copies():
    def fn(x):
        held = ([],)
        held[0].append(held)
        copied = copy.deepcopy(held)
        same = copy.copy(SOLE) is SOLE, copy.deepcopy(SOLE) is SOLE
        return x + 1, same, copied[0][0] is copied, copied is held

    return calls(fn, *[lambda: (normal(3),)] * 2)


class Names:
    """Names that patterns look up."""

    text, first, second, called = str, "first", "first", 3


def matched(subject, k):  # noqa: C901 one pattern each
    match subject:
        case Degrees(value) if k == 0:
            return value + 1
        case Pair(one, first=two) if k == 1:
            return one, two
        case Pair(one, two, three) if k == 2:
            return one, two, three
        case Listed(one) if k == 3:
            return one
        case Numbered(one) if k == 4:
            return one
        case range(one) if k == 5:
            return one
        case Names.text(one, two) if k == 6:
            return one, two
        case {Names.first: one, Names.second: two} if k == 7:
            return one, two
        case Names.called(one) if k == 8:
            return one
    return "no match"


def _patterns():
    def fn(x, k):
        subject = (Degrees(3.5), Pair(1, 2), Pair(1, 2), Listed(1, 2), Numbered(1, 2), range(3), "text")
        subject = (*subject, {"first": x}, 3)[k]
        try:
            return x + 1, matched(subject, k)
        except (TypeError, ValueError, AttributeError) as error:
            return x * 2, str(error)

    return calls(fn, *[lambda k=k: (normal(3), k) for k in range(9)])


def _copies_of_slices():
    def fn(x):
        bounds = slice([1], [x, 3])
        copied = copy.deepcopy({"bounds": bounds})["bounds"]
        copied.stop[0].add_(1)
        return copied.start is bounds.start, copied.stop, bounds.stop, x[copy.deepcopy(slice(1, None))]

    return calls(fn, *[lambda: (normal(3),)] * 2)


def _extremes_of_tensors():
    """Sizes that buffers say, as convolutions of codecs have them."""
    stride, taps = torch.tensor(2), torch.tensor(7)

    def fn(x, more):
        right = (taps - stride) // 2
        left = taps - stride - right
        most, least = max(left, right + more), min(right, 3, more)
        with contextlib.suppress(RuntimeError):
            max(x, x)
        if x.shape[-1] <= most:
            x = torch.nn.functional.pad(x, (0, most - x.shape[-1] + 1))
        return (
            torch.nn.functional.pad(x, (left, right), "reflect"),
            most,
            least,
            max(left, key=None, *[right]),
        )

    return calls(
        fn, *[lambda n=n, k=k: (normal(2, n), k) for n, k in ((9, 0), (9, 0), (12, 1), (9, 4), (3, 5))]
    )


programs_of(globals(), "lookup")
