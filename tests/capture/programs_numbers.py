"""Numbers that change from call to call, and the program's own methods that they go through."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import torch
from capture_world import World, calls, normal, programs

CHANGING = (1, -1, 2, 0, -3, 5, 1, -2, 4)


class Box:
    """A number with every protocol that CPython asks for one."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return self.value > 0

    def __len__(self) -> int:
        return abs(self.value)

    def __contains__(self, item: Any) -> bool:
        return item < self.value

    def __eq__(self, other: Any) -> Any:
        return self.value == other

    def __hash__(self) -> int:
        return hash(self.value)

    def __lt__(self, other: Any) -> Any:
        return self.value < getattr(other, "value", other)

    def __getitem__(self, index: Any) -> Any:
        if index >= abs(self.value):
            raise IndexError(index)
        return index * 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(abs(self.value)))

    def __index__(self) -> int:
        return abs(self.value)

    def __int__(self) -> int:
        return self.value

    def __float__(self) -> float:
        return self.value / 2

    def __call__(self, x: Any) -> Any:
        return x * self.value

    def __neg__(self) -> Any:
        return -self.value

    def __add__(self, other: Any) -> Any:
        return self.value + other

    def __radd__(self, other: Any) -> Any:
        return other - self.value

    def __round__(self, digits: Any = None) -> int:
        return self.value

    def __str__(self) -> str:
        return f"<{self.value}>"

    def __format__(self, spec: str) -> str:
        return f"{self.value}{spec}"


class OnlyLength:
    def __init__(self, value: int) -> None:
        self.value = value

    def __len__(self) -> int:
        return abs(self.value)


class Odd(OnlyLength):
    """Its answers are what CPython refuses."""

    def __bool__(self) -> Any:
        return self.value if self.value < 2 else True

    def __len__(self) -> Any:
        return self.value if self.value else "none"


class TensorAnswers:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __contains__(self, item: Any) -> Any:
        return torch.tensor(self.value) > 0

    def __eq__(self, other: Any) -> Any:
        return torch.tensor([self.value > 1])


class CountingList(list):
    def __bool__(self) -> bool:
        return sum(self) > 0


class Counting:
    def __init__(self) -> None:
        self.asked = 0

    def __contains__(self, item: Any) -> Any:
        self.asked += 1
        return torch.tensor(item > 0)

    def __bool__(self) -> bool:
        self.asked += 1
        return self.asked % 3 > 0


class Meta(type):
    limit = 0

    def __instancecheck__(cls, value: Any) -> bool:
        return getattr(value, "value", 0) > cls.limit


class Above(metaclass=Meta):
    pass


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Setting:
    scale: Any
    shift: Any = 0

    def __bool__(self) -> bool:
        return self.scale > self.shift


@dataclasses.dataclass(frozen=True, order=True)
class Frozen:
    value: Any


def _chosen(holds: Any, x: Any) -> Any:
    return x if holds else -x


def _caught(function: Callable[..., Any]) -> Callable[..., Any]:
    def tried(x: Any, value: Any) -> Any:
        try:
            return function(x, value)
        except (TypeError, ValueError, IndexError, ZeroDivisionError, OverflowError) as error:
            return x * 3, type(error).__name__, str(error)

    return tried


def _matched(x: Any, value: Any) -> Any:
    match value:
        case 1 | 2:
            return x + 1
        case int(n) if n < 0:
            return x * n
        case _:
            return x


def _while_counting(x: Any, n: Any) -> Any:
    box = Box(n)
    while box:
        x = x + 1
        box.value -= 1
    return x, box.value


def _many_conditions(x: Any, n: Any) -> Any:
    box = Box(n)
    return (
        x * 2 if box and n != 2 else x,
        x if not box else -x,
        (box or x) is x,
        any([box, Box(0)]),
        all([Box(1), box]),
        list(filter(None, [box, Box(-1)])) == [],
    )


_of_number: dict[str, Callable[[Any, Any], Any]] = {
    "bool": lambda x, n: _chosen(Box(n), x),
    "not": lambda x, n: x * (not Box(n)),
    "bool_called": lambda x, n: _chosen(bool(Box(n)), x),
    "length": lambda x, n: x * len(Box(n)),
    "length_decides": lambda x, n: _chosen(len(OnlyLength(n)) > 1, x),
    "length_as_truth": lambda x, n: _chosen(OnlyLength(n), x),
    "contains": lambda x, n: _chosen(1 in Box(n), x),
    "not_contains": lambda x, n: _chosen(0 not in Box(n), x),
    "equal": lambda x, n: _chosen(Box(n) == 2, x),
    "less": lambda x, n: _chosen(Box(n) < 1, x),
    "sorted": lambda x, n: x * sorted([Box(n), Box(1)])[0].value,
    "iterated": lambda x, n: x + sum(Box(n)),
    "items": lambda x, n: [x * item for item in Box(n)],
    "indexed": _caught(lambda x, n: x * Box(n)[2]),
    "as_index": _caught(lambda x, n: [10, 20, 30, 40][Box(n)] + x),
    "as_range": lambda x, n: x + sum(range(Box(n))),
    "as_int": lambda x, n: x * int(Box(n)) + float(Box(n)),
    "called": lambda x, n: Box(n)(x),
    "negated": lambda x, n: x * -Box(n),
    "added": lambda x, n: x * (Box(n) + 1) + x * (1 + Box(n)),
    "rounded": lambda x, n: x * round(Box(n)),
    "formatted": lambda x, n: (x, f"{Box(n)} {Box(n):+} {n:03d}", str(n), f"{n}{n!r}"),
    "hashed": lambda x, n: {Box(n): x, Box(1): x * 2}.get(1, x * 5),
    "in_set": lambda x, n: _chosen(n in {1, 2, 5}, x),
    "in_dict": lambda x, n: {1: x, 2: x * 2}.get(n, x * 3),
    "as_key": lambda x, n: {str(n): x}[str(n)] * len({n: 0, 1: 1}),
    "odd_truth": _caught(lambda x, n: _chosen(Odd(n), x)),
    "odd_length": _caught(lambda x, n: x * len(Odd(n))),
    "tensor_contains": lambda x, n: _chosen(3 in TensorAnswers(n), x),
    "tensor_equal": lambda x, n: _chosen(TensorAnswers(n) == 3, x),
    "list_with_truth": lambda x, n: _chosen(CountingList([n, 1]), x),
    "list_of_length": lambda x, n: _chosen([0] * abs(n), x),
    "instance_of_meta": lambda x, n: _chosen(isinstance(Box(n), Above), x),
    "smaller_type": lambda x, n: (x * min(n, 1.5), isinstance(min(n, 1.5), int), type(max(n, 0.5)).__name__),
    "power_type": _caught(lambda x, n: (x * 2**n, isinstance(2**n, float))),
    "quotient": _caught(lambda x, n: (x * (7 // n), 7 % n, divmod(7, n), 7 / n)),
    "root": _caught(lambda x, n: x * math.sqrt(n) + math.log(n + 1)),
    "identity": lambda x, n: (x, n == 1, n is not None, n == True),  # noqa: E712
    "matched": _matched,
    "while_counting": _while_counting,
    "many_conditions": _many_conditions,
    "in_place": lambda x, n: [n := n + x, n][1] if n > 2 else x - n,
    "sliced": lambda x, n: (x[: abs(n)], x[n:] * 2, x[..., :n]),
    "in_place_number": lambda x, n: _added(n, x),
    "shape": lambda x, n: torch.zeros(abs(n), 2).sum(0) + torch.full((2,), n) + x[:2, 0],
    "repeat": lambda x, n: x.repeat(abs(n), 1) * n,
    "filled": lambda x, n: x.masked_fill(x > n, float(n)).clamp(min=n),
    "integers": _caught(lambda x, n: torch.arange(3) ** n + torch.arange(3) * n),
    "bytes": _caught(lambda x, n: torch.ones(3, dtype=torch.uint8).add_(n * 60) + 1),
    "level": lambda x, n: x * (Level.HIGH if n > 1 else Level.LOW),
    "pair": lambda x, n: Pair(x * n, n)._replace(b=x)[1] + Pair(n, x).a,
    "setting": lambda x, n: (_chosen(Setting(n, 1), x), Setting(n) == Setting(n), Setting(x, n).shift),
    "frozen": lambda x, n: (_chosen(Frozen(n) < Frozen(1), x), len({Frozen(n), Frozen(1)})),
    "counter": lambda x, n: x * Counter([n, 1, n])[1] + Counter(a=n)["a"],
}


def _added(n: Any, x: Any) -> Any:
    n += x
    n *= 2
    return n


def _numbers(function: Callable[..., Any], values: Any = CHANGING) -> World:
    return calls(function, *[lambda n=n: (normal(4, 3), n) for n in values])


for _name, _function in _of_number.items():
    programs(**{f"number_{_name}": lambda function=_function: _numbers(function)})  # type: ignore[misc]


def _held(function: Callable[..., Any], holder: Any) -> World:
    """The number is an attribute of an object that stays."""
    world = calls(lambda x: function(x, holder), *[lambda: (normal(4, 3),)] * len(CHANGING))
    sets = [lambda n=n: setattr(holder, "value", n) for n in CHANGING]
    world.steps = [(set_up, make) for set_up, (_, make) in zip(sets, world.steps)]
    world.observe = lambda: {**vars(holder)}
    return world


def _counted() -> World:
    counting = Counting()
    return calls(
        lambda x, n: (_chosen(n in counting, x), _chosen(counting, x)),
        *[lambda n=n: (normal(4, 3), n) for n in CHANGING],
        observe=lambda: counting.asked,
    )


programs(
    number_held_truth=lambda: _held(_swapped(lambda x, box: _chosen(box, x)), Box(1)),
    number_held_length=lambda: _held(_swapped(lambda x, box: x * len(box)), Box(1)),
    number_held_contains=lambda: _held(_swapped(lambda x, box: _chosen(0 in box, x)), Box(1)),
    number_held_equal=lambda: _held(_swapped(lambda x, box: _chosen(box == 2, x)), Box(1)),
    number_held_float=lambda: _held(_swapped(lambda x, box: x * float(box)), Box(1)),
    number_counting=_counted,
    number_floats=lambda: _numbers(
        lambda x, v: _chosen(Box(v), x) * v, (0.5, -0.5, 0.0, -0.0, 1e30, 2.5, -1.5)
    ),
    number_float_nan=lambda: _numbers(
        lambda x, v: (_chosen(v == v, x), _chosen(v < 1, x)), (0.5, float("nan"), 2.0, float("nan"), 0.1)
    ),
    number_kinds=lambda: _numbers(
        lambda x, v: (x * v, type(v).__name__), (1, 2, 2.0, True, 3, False, 4.5, 1)
    ),
)


def _swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, holder: function(x, holder)
