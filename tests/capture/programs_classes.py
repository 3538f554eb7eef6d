"""Classes that decide what attributes, calls and comparisons mean, and that change between calls."""

from __future__ import annotations

import abc
import copy
import dataclasses
import enum
import functools
import pickle
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
from capture_world import World, calls, normal, programs_of, steps
from torch import nn


class Computed:
    """``__getattr__`` and ``__getattribute__`` with state."""

    def __init__(self) -> None:
        self.scale, self.reads = 2.0, 0

    def __getattribute__(self, name: str) -> Any:
        if name == "scale":
            object.__setattr__(self, "reads", object.__getattribute__(self, "reads") + 1)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("power_"):
            return int(name[6:]) + self.reads % 2
        raise AttributeError(name)


class Remembered:
    """A descriptor that counts, and keeps values by instance."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.reads = 0

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, value: Any, owner: Any = None) -> Any:
        self.reads += 1
        return self if value is None else vars(value).get(f"_{self.name}", 1.0)

    def __set__(self, value: Any, item: Any) -> None:
        vars(value)[f"_{self.name}"] = item * 2


class Lazy:
    """A descriptor without ``__set__``: the instance's entry hides it once there."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, value: Any, owner: Any = None) -> Any:
        if value is None:
            return self
        made = vars(value)[self.name] = self.make(value)
        return made


def _getattribute() -> World:
    held = Computed()
    return steps(
        lambda x: (x * held.scale, x + held.power_3),
        *(
            None,
            None,
            None,
            lambda: setattr(held, "scale", 3.0),
            None,
            lambda: setattr(held, "power_3", 9),
            None,
        ),
        observe=lambda: dict(vars(held)),
    )


def _descriptor() -> World:
    class Holder:
        level = Remembered()

    held = Holder()

    def function(x: Any) -> Any:
        y = x * held.level
        held.level = held.level + 1
        return y

    return steps(
        function,
        *[None] * 5,
        lambda: setattr(held, "level", 0.5),
        None,
        observe=lambda: (dict(vars(held)), vars(Holder)["level"].reads),
    )


def _lazy_descriptor() -> World:
    class Holder:
        def __init__(self, base: float) -> None:
            self.base = base

        twice = Lazy(lambda self: self.base * 2)

        @functools.cached_property
        def thrice(self) -> float:
            return self.base * 3

    held = Holder(1.5)
    return steps(
        lambda x: x * held.twice + held.thrice,
        *(None, None, lambda: setattr(held, "base", 7.0), lambda: vars(held).pop("twice"), None),
        *(lambda: vars(held).pop("thrice"), lambda: setattr(held, "thrice", 0.5), None),
        observe=lambda: dict(vars(held)),
    )


def _class_attribute() -> World:
    class Base:
        scale: Any = 2.0

    class Child(Base):
        pass

    held = Child()
    return steps(
        lambda x: x * held.scale + Child.scale,
        *(None, None, lambda: setattr(Base, "scale", 3.0), None, lambda: setattr(Child, "scale", 4.0), None),
        *(
            lambda: setattr(held, "scale", 5.0),
            lambda: delattr(Child, "scale"),
            lambda: delattr(held, "scale"),
        ),
    )


def _patched_method() -> World:
    class Layer(nn.Module):
        def inner(self, x: Any) -> Any:
            return x * 2

        def forward(self, x: Any) -> Any:
            return self.inner(x) + 1

    layer = Layer()
    original = Layer.inner
    return steps(
        layer,
        *(None, None, lambda: setattr(Layer, "inner", lambda self, x: x * 3), None),
        lambda: setattr(layer, "inner", lambda x: x * 5),
        lambda: delattr(layer, "inner"),
        lambda: setattr(Layer, "inner", original),
        lambda: setattr(layer, "forward", lambda x: x - 1),
        None,
    )


def _patched_operator() -> World:
    home = types.SimpleNamespace(act=torch.relu)
    return steps(
        lambda x: home.act(x) * 2,
        *(
            None,
            None,
            lambda: setattr(home, "act", torch.tanh),
            None,
            lambda: setattr(home, "act", torch.relu),
        ),
        *(lambda: setattr(home, "act", lambda x: x * 7), None),
    )


def _hooks() -> World:
    layer = nn.Linear(4, 4).requires_grad_(False)
    handles: list[Any] = []
    seen: list[Any] = []

    def add(hook: Any, before: bool = False) -> Callable[[], Any]:
        register = layer.register_forward_pre_hook if before else layer.register_forward_hook
        return lambda: handles.append(register(hook))

    return steps(
        layer,
        *(None, None, add(lambda m, a, y: y * 2), None, add(lambda m, a: (a[0] + 1,), True)),
        *(add(lambda m, a, y: seen.append(tuple(y.shape))), None, lambda: handles[0].remove(), None),
        observe=lambda: list(seen),
    )


def _hook_with_state() -> World:
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False)
    kept: dict[str, Any] = {"count": 0}

    def hook(module: Any, given: Any, result: Any) -> Any:
        kept["last"] = result
        kept["count"] += 1
        return result * kept["count"]

    layer[0].register_forward_hook(hook)
    return steps(layer, *[None] * 6, observe=lambda: dict(kept))


def _tensor_hooks() -> World:
    seen: list[float] = []

    def function(x: Any) -> Any:
        x = x.detach().requires_grad_(True)
        y = (x * 3).tanh()
        y.register_hook(lambda g: seen.append(float(g.sum())))
        y.sum().backward()
        return x.grad

    return steps(function, *[None] * 5, observe=lambda: list(seen))


def _metaclass() -> World:
    class Meta(type):
        made = 0

        def __call__(cls, *args: Any) -> Any:
            Meta.made += 1
            return super().__call__(*args)

        def __getattr__(cls, name: str) -> Any:
            return len(name)

        @property
        def limit(cls) -> float:
            return cls.base * 2

    class Kind(metaclass=Meta):
        base = 1.5

        def __init__(self, value: Any) -> None:
            self.value = value

    return steps(
        lambda x: Kind(x).value * Kind.limit + Kind.four,
        *(None, None, None, lambda: setattr(Kind, "base", 2.5), None, lambda: setattr(Kind, "four", 9), None),
        observe=lambda: Meta.made,
    )


def _slots() -> World:
    class Slotted:
        __slots__ = ("a", "b")

    held = Slotted()
    held.a = 1.0

    def function(x: Any) -> Any:
        held.b = x.sum() if hasattr(held, "b") else x
        held.a = held.a + 1
        return x * held.a

    return steps(
        function,
        *(None, None, None, lambda: delattr(held, "b"), None, lambda: setattr(held, "a", -1.0)),
        observe=lambda: (held.a, held.b),
    )


def _property_with_effect() -> World:
    class Holder:
        def __init__(self) -> None:
            self.reads = 0

        @property
        def scale(self) -> int:
            self.reads += 1
            return self.reads

        @scale.setter
        def scale(self, value: int) -> None:
            self.reads = value * 10

    held = Holder()

    def function(x: Any) -> Any:
        y = x * held.scale + held.scale
        if held.reads > 8:
            held.scale = 0
        return y

    return steps(function, *[None] * 8, observe=lambda: held.reads)


def _inheritance_changes() -> World:
    class One:
        def run(self, x: Any) -> Any:
            return x + 1

    class Two:
        def run(self, x: Any) -> Any:
            return x * 2

    class Both(One, Two):
        pass

    held = Both()
    return steps(
        lambda x: held.run(x),
        *(None, None, lambda: setattr(Both, "__bases__", (Two, One)), None),
        *(lambda: setattr(held, "__class__", type("Other", (One,), {})), None),
    )


class Colour(enum.Enum):
    RED = 1
    BLUE = 2

    @property
    def scale(self) -> int:
        return self.value * 10

    @classmethod
    def default(cls) -> Colour:
        return cls.RED


class Flags(enum.Flag):
    A = 1
    B = 2
    C = 4


def _enums() -> World:
    def function(x: Any, colour: Any, flags: Any = Flags.A) -> Any:
        if colour is Colour.RED:
            x = x + 1
        return (
            x * colour.scale,
            Flags.B in flags,
            colour.name,
            Colour(colour.value),
            Colour.default() == colour,
        )

    return calls(
        function,
        *[lambda c=c, f=f: (normal(2), c, f) for c in Colour for f in (Flags.A, Flags.A | Flags.B, Flags.C)],
    )


Point = namedtuple("Point", "x y", defaults=[3])


@dataclasses.dataclass
class Config:
    scale: Any
    items: list[Any] = dataclasses.field(default_factory=list)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.extra["made"] = len(self.items)


def _dataclasses() -> World:
    def function(x: Any, config: Any) -> Any:
        config.items.append(x.sum())
        other = dataclasses.replace(config, scale=config.scale + 1)
        return x * config.scale, other, dataclasses.astuple(Point(1, 2)) if False else other.extra

    configs = [Config(1.0), Config(2.0, [1]), Config(3)]
    return calls(function, *[lambda at=at: (normal(2), configs[at]) for at in (0, 0, 1, 0, 2, 1)])


def _namedtuples() -> World:
    def function(x: Any, point: Any) -> Any:
        a, b = point
        return (
            point._replace(x=x * a),
            Point(b),
            point._asdict(),
            point == Point(1, 3),
            isinstance(point, tuple),
        )

    return calls(
        function,
        *[lambda p=p: (normal(2), p) for p in (Point(1), Point(2), Point(1, 3), Point(7), Point(5, 6))],
    )


def _ordered_subclass() -> World:
    class Output(OrderedDict):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            object.__setattr__(self, key, value)

        def __getitem__(self, key: Any) -> Any:
            return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)

    def function(x: Any) -> Any:
        out = Output()
        out["a"] = x + 1
        out["b"] = x * 2
        return out, out[0] + out["b"], out.a

    return steps(function, *[None] * 4)


def _mapping_subclass() -> World:
    class Defaults(dict):
        def __missing__(self, key: Any) -> Any:
            self[key] = len(self)
            return self[key]

    held = Defaults(a=1)
    user = UserDict({"s": 2.0})
    return steps(
        lambda x: x * held["a"] + held["b"] + user["s"] + held.get("zz", 4),
        *(None, None, lambda: held.pop("b"), lambda: held.update(zz=1), lambda: user.update(s=5.0), None),
        observe=lambda: (dict(held), dict(user)),
    )


def _default_dictionary() -> World:
    held: Any = defaultdict(list)
    return steps(
        lambda x: (held[len(held)].append(x), held[0][0] * 2, len(held["k"]))[1:],
        *[None] * 4,
        held.clear,
        lambda: setattr(held, "default_factory", lambda: [torch.ones(3, 4)]),
        None,
        observe=lambda: {key: list(value) for key, value in held.items()},
    )


def _copied() -> World:
    layer = nn.Linear(4, 2).requires_grad_(False)

    def function(x: Any) -> Any:
        twin = copy.deepcopy(layer)
        with torch.no_grad():
            twin.weight.mul_(2)
        return twin(x), layer(x), copy.copy([x])[0] is x

    return steps(
        function, *[None] * 3, lambda: layer.weight.add_(1), None, observe=lambda: layer.weight.clone()
    )


def _pickled() -> World:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)
    box: list[Any] = [layer]

    def again() -> None:
        box[0] = pickle.loads(pickle.dumps(box[0]))

    return steps(
        lambda x: box[0](x),
        *(None, None, again, None, lambda: box[0][0].bias.add_(1), again, lambda: box.__setitem__(0, layer)),
    )


def _stored_state() -> World:
    layer = nn.BatchNorm1d(4).requires_grad_(False)
    first = copy.deepcopy(layer.state_dict())
    return steps(
        layer,
        *(None, None, layer.eval, None, lambda: layer.load_state_dict(first), layer.train, None),
        observe=lambda: {key: value.clone() for key, value in layer.state_dict().items()},
    )


def _weak_references() -> World:
    class Holder:
        scale = 2.0

    held: list[Any] = [Holder()]
    reference = [weakref.ref(held[0])]
    cache: Any = weakref.WeakKeyDictionary({held[0]: 5.0})

    def function(x: Any) -> Any:
        target = reference[0]()
        return x * (target.scale if target is not None else -1.0) + cache.get(target, 0.0)

    def renew() -> None:
        held[0] = Holder()
        reference[0] = weakref.ref(held[0])

    return steps(function, None, None, held.clear, None, lambda: held.append(Holder()), None, renew, None)


class Scaled(torch.Tensor):
    """A subclass that overrides operators."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(function, kinds, args, kwargs or {})
        return found * 2 if function is torch.add else found


def _tensor_subclass() -> World:
    plain, scaled = (lambda: (normal(3),)), (lambda: (normal(3).as_subclass(Scaled),))
    return calls(
        lambda x: torch.add(x, 1) * torch.ones(3), plain, scaled, plain, scaled, scaled, plain, plain
    )


def _abstract() -> World:
    class Sized(abc.ABC):
        @abc.abstractmethod
        def size(self) -> int: ...

    class Mine:
        def size(self) -> int:
            return 3

    held = Mine()
    return steps(
        lambda x: x * (2 if isinstance(held, Sized) else 1),
        None,
        None,
        lambda: Sized.register(Mine),
        None,
        None,
    )


def _partials() -> World:
    scaled = functools.partial(torch.mul, other=3.0)
    box = [functools.partial(lambda x, y, z=1: x * y + z, y=2)]
    return steps(
        lambda x: scaled(x) + box[0](x),
        *(None, None, lambda: box.__setitem__(0, functools.partial(box[0], z=5)), None),
        *(lambda: box[0].keywords.update(z=7), lambda: scaled.keywords.update(other=1.0), None),
    )


def _cached_function() -> World:
    runs: list[int] = []

    @functools.lru_cache(maxsize=4)
    def table(n: int) -> float:
        runs.append(n)
        return n * 1.5

    return calls(
        lambda x, n: x * table(n) + table(1),
        *[lambda n=n: (normal(3), n) for n in (1, 2, 1, 3, 2, 4, 5)],
        observe=lambda: (list(runs), table.cache_info().hits),
    )


def _class_properties() -> World:
    class Columns:
        first = 1

        @classmethod
        @property
        def pair(cls) -> slice:
            return slice(cls.first, cls.first + 2)

    def use(x: torch.Tensor, of: Any) -> Any:
        return x[of.pair].tanh() if type(of.pair) is slice else x  # a method from Python 3.13 on

    return calls(
        use, lambda: (normal(4), Columns), lambda: (normal(4), Columns()), lambda: (normal(4), Columns)
    )


def _super_without_arguments() -> World:
    class Base:
        @staticmethod
        def make() -> Any:
            return super().__init__()

    def use(x: torch.Tensor) -> str:
        try:
            Base.make()
        except RuntimeError as error:
            return f"{error} {x.sum()}"
        return ""

    return calls(use, *[lambda: (normal(4),)] * 2)


programs_of(globals(), "class")
