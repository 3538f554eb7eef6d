"""What Python calls in a program happens once in each call, also where recording ends within it."""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable
from typing import Any

from capture_world import World, calls, normal, programs


class Hits:
    """How often a method of `Asked` was called: no record can set the attribute of a class."""

    count = 0


def _counted(result: Any) -> Callable[..., Any]:
    """Return a method that is counted, and gives `result`, or what that makes of the arguments."""

    def method(*args: Any, **kwargs: Any) -> Any:
        Hits.count += 1
        return result(*args, **kwargs) if callable(result) else result

    return method


class Made:
    """What is counted as it is made."""

    __new__ = _counted(lambda kind, *args: object.__new__(kind))

    def __init__(self, value: int) -> None:
        self.value = value


class Asked:
    """An object whose methods are all counted."""

    __match_args__ = ("part",)
    __iter__ = _counted(lambda self: iter([1, 2]))
    __len__ = __index__ = _counted(2)
    __getitem__ = _counted(lambda self, key: key)
    keys = _counted(["a", "b"])
    __contains__ = __eq__ = __lt__ = __bool__ = _counted(True)
    __hash__ = __int__ = __neg__ = __abs__ = __call__ = _counted(3)
    __add__ = __radd__ = __matmul__ = _counted(5)
    __getattr__ = _counted(lambda self, name: 4)
    __str__ = __repr__ = _counted("text")
    __format__ = _counted(lambda self, spec: spec)
    __reversed__ = _counted(lambda self: iter([2, 1]))
    __enter__ = _counted(lambda self: self)
    __exit__ = _counted(False)
    part = property(_counted(6))


class Missing(dict):
    """A dictionary that is asked for what it lacks."""

    __missing__ = _counted(1)


def _matched(value: Any) -> Any:
    match value:
        case {"a": found}:
            return found
        case [first, second]:
            return first, second
        case Asked(found):
            return found


def _entered(value: Any) -> Any:
    with value as inner:
        return inner.value


def _generated() -> Any:
    for number in range(3):
        Hits.count += 1
        yield number


def _named(**given: Any) -> list[str]:
    return sorted(given)


_negative = _counted(operator.neg)


def _world(act: Callable[[Asked], Any]) -> World:
    def function(x: Any) -> Any:
        return x * 2, act(asked)

    Hits.count, asked = 0, Asked()
    return calls(function, *(lambda: (normal(3),),) * 3, observe=lambda: Hits.count)


ACTS: dict[str, Callable[[Asked], Any]] = {
    "list": list,
    "display": lambda asked: [*asked, 3],
    "display_of_a_set": lambda asked: {*asked},
    "arguments": lambda asked: max(*asked, 0),
    "named_arguments": lambda asked: _named(**asked),
    "dictionary": lambda asked: {**asked},
    "unpacked": lambda asked: (lambda first, *rest: (first, rest))(*asked),
    "iterated": lambda asked: [item for item in asked],  # noqa: C416
    "length": len,
    "item": lambda asked: asked[1],
    "membership": lambda asked: 7 in asked,
    "membership_in_a_list": lambda asked: 1 in [asked],
    "truth": lambda asked: 1 if asked else 2,
    "equality": lambda asked: asked != 3,
    "order": lambda asked: 4 > asked,
    "maximum": lambda asked: max(asked, 4) is asked,
    "hash": hash,
    "key": lambda asked: {asked: 1}[asked],
    "index": lambda asked: [1, 2, 3][asked],
    "number": int,
    "negative": operator.neg,
    "absolute": abs,
    "sum": lambda asked: 1 + asked,
    "product": lambda asked: asked @ 1,
    "attribute": lambda asked: (asked.other, getattr(asked, "another", 0), hasattr(asked, "third")),
    "property": lambda asked: asked.part,
    "text": lambda asked: (f"{asked:x}", f"{asked!r}", str(asked), "%s" % asked),  # noqa: UP031
    "reversed": lambda asked: [*reversed(asked)],
    "called": lambda asked: asked(1),
    "entered": lambda asked: _entered(asked) and 1,
    "matched": _matched,
    "made": lambda asked: Made(3).value,
    "missing": lambda asked: Missing()["a"],
    "default": lambda asked: collections.defaultdict(lambda: _negative(1))["a"],
    "generated": lambda asked: (list(_generated()), sum(_generated()), any(_generated()), {*_generated()}),
    "sorted": lambda asked: sorted([1, 2], key=_negative),
    "smallest": lambda asked: min([1, 2], key=_negative),
    "mapped": lambda asked: list(map(_negative, [1, 2])),
    "reduced": lambda asked: functools.reduce(lambda left, right: _negative(left) + right, [1, 2, 3]),
}
programs(**{f"once_{name}": functools.partial(_world, act) for name, act in ACTS.items()})
