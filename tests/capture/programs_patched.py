"""Classes made on the way, attributes with effects, functions and modules replaced between calls, caches."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import gc
import sys
import types
import weakref
from typing import Any

import torch
import torch.nn.functional as functional
from capture_world import World, calls, normal, programs_of, steps
from torch import nn


def _classes_made_inside() -> World:
    made: list[Any] = []

    def function(x: Any, n: int) -> Any:
        base = made[-1] if made and n else object
        kind = type(
            f"Kind{n}",
            (base,),
            {"scale": n + 1.0, "run": lambda self, y: y * self.scale + len(type(self).__mro__)},
        )
        made.append(kind)
        value = kind()
        return value.run(x), isinstance(value, made[0]), issubclass(kind, base), kind.__name__, len(made)

    return calls(function, *[lambda n=n: (normal(3), n) for n in (0, 1, 1, 0, 2, 1)])


def _subclasses_registered() -> World:
    class Plugin:
        known: dict[str, Any] = {}
        order = 0

        def __init_subclass__(cls, key: str = "", **rest: Any) -> None:
            super().__init_subclass__(**rest)
            Plugin.known[key or cls.__name__] = cls
            Plugin.order += 1

        def run(self, x: Any) -> Any:
            return x + type(self).order

    def function(x: Any, key: str) -> Any:
        class Local(Plugin, key=key):
            def run(self, x: Any) -> Any:
                return super().run(x) * len(key)

        return sum(kind().run(x) for kind in Plugin.known.values()), Local.__qualname__

    return calls(
        function,
        *[lambda k=k: (normal(3), k) for k in ("a", "b", "a", "ccc", "b")],
        observe=lambda: [*Plugin.known],
    )


def _classes_that_make_one() -> World:
    class Single(type):
        made: dict[Any, Any] = {}

        def __call__(cls, *args: Any) -> Any:
            if cls not in Single.made:
                Single.made[cls] = super().__call__(*args)
            Single.made[cls].uses += 1
            return Single.made[cls]

        def __instancecheck__(cls, value: Any) -> bool:
            return getattr(value, "uses", 0) > 2

    class Config(metaclass=Single):
        def __init__(self, scale: float) -> None:
            self.scale, self.uses = scale, 0

    def function(x: Any, scale: float) -> Any:
        config = Config(scale)
        return x * config.scale, config.uses, isinstance(config, Config), isinstance(x, Config)

    return calls(
        function,
        *[lambda s=s: (normal(3), s) for s in (2.0, 3.0, 2.0, 5.0)],
        observe=lambda: len(Single.made),
    )


def _class_assigned() -> World:
    class Slow(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    class Fast(Slow):
        def forward(self, x: Any) -> Any:
            return super().forward(x) + 1

    model = Slow()

    def function(x: Any, n: int) -> Any:
        before = type(model).__name__
        if n == 1:
            model.__class__ = Fast
        y = model(x)
        if n == 2:
            model.__class__ = Slow
        return y, before, isinstance(model, Fast)

    return calls(function, *[lambda n=n: (normal(3), n) for n in (0, 1, 0, 2, 0, 1)])


def _slots() -> World:
    class Point:
        __slots__ = ("__dict__", "x", "y")

        def __init__(self, x: Any) -> None:
            self.x = x

    kept = Point(2.0)

    def function(x: Any, n: int) -> Any:
        point = Point(x)
        if n == 1:
            kept.y = x
        elif n == 2:
            del kept.x
        elif n == 3:
            kept.x, kept.extra = 3.0, n
        try:
            return point.x * kept.x + getattr(kept, "y", 0), vars(kept)
        except AttributeError as error:
            return str(error).rsplit("'", 2)[1]

    return calls(function, *[lambda n=n: (normal(3), n) for n in (0, 1, 0, 2, 0, 3, 1)])


def _data_classes() -> World:
    count = [0]

    def following() -> int:
        count[0] += 1
        return count[0]

    @dataclasses.dataclass(slots=True)
    class Item:
        x: Any
        number: int = dataclasses.field(default_factory=following)
        parts: list[Any] = dataclasses.field(default_factory=list)
        twice: dataclasses.InitVar[float] = 2.0

        def __post_init__(self, twice: float) -> None:
            self.parts.append(self.x * twice)

    @dataclasses.dataclass(frozen=True, order=True)
    class Key:
        name: str
        n: int = 0

    table: dict[Any, Any] = {}

    def function(x: Any, n: int) -> Any:
        first = Item(x)
        second = dataclasses.replace(first, number=n, twice=3.0)
        key = Key("k", n)
        table[key] = table.get(Key("k", n), 0) + second.number
        try:
            key.n = 3
        except dataclasses.FrozenInstanceError as error:
            text = str(error)
        return (
            first.parts,
            second.parts is first.parts,
            max(table).n,
            text,
            [f.name for f in dataclasses.fields(first)],
        )

    return calls(
        function,
        *[lambda n=n: (normal(3), n) for n in (1, 1, 2, 5, 1)],
        observe=lambda: (count[0], len(table)),
    )


def _properties_with_effects() -> World:
    class Meter:
        def __init__(self) -> None:
            self.reads, self._value = 0, 1.0

        @property
        def value(self) -> float:
            self.reads += 1
            return self._value * self.reads

        @value.setter
        def value(self, new: Any) -> None:
            self._value = float(new) / 2

        @value.deleter
        def value(self) -> None:
            self._value = -1.0

        @functools.cached_property
        def base(self) -> Any:
            self.reads += 10
            return torch.full((3,), float(self.reads))

    meter = Meter()

    def function(x: Any, n: int) -> Any:
        y = x * meter.value + meter.base
        if n == 1:
            meter.value = 8
        elif n == 2:
            del meter.value
        elif n == 3:
            del meter.base
        return y, meter.value, "base" in vars(meter)

    return calls(
        function, *[lambda n=n: (normal(3), n) for n in (0, 1, 0, 2, 3, 0, 3)], observe=lambda: meter.reads
    )


def _functions_of_torch_replaced() -> World:
    originals = functional.silu, torch.Tensor.relu, nn.Linear.forward, torch.tanh
    layer = nn.Linear(3, 3).requires_grad_(False)

    def put(n: int) -> None:
        functional.silu, torch.Tensor.relu, nn.Linear.forward, torch.tanh = originals
        if n == 1:
            functional.silu = lambda x: x + 100
        elif n == 2:
            torch.Tensor.relu = lambda self: self - 100
        elif n == 3:
            nn.Linear.forward = lambda self, x: x * 3
        elif n == 4:
            torch.tanh = torch.sigmoid

    def function(x: Any, n: int) -> Any:
        put(n)
        try:
            return functional.silu(x) + x.relu() + layer(x) + torch.tanh(x)
        finally:
            put(0)

    return calls(function, *[lambda n=n: (normal(2, 3), n) for n in (0, 1, 2, 3, 4, 0)])


def _functions_replaced_between() -> World:
    original = functional.gelu

    def function(x: Any) -> Any:
        return functional.gelu(x) * torch.Tensor.mean(x)

    def replaced() -> None:
        functional.gelu = lambda x: x * 2

    def put_back() -> None:
        functional.gelu = original

    return steps(function, None, None, replaced, None, put_back, None)


def _modules_by_name() -> World:
    def module(scale: float) -> types.ModuleType:
        made = types.ModuleType("ladder_test_plugin")
        made.scale = scale
        made.run = lambda x: x * made.scale
        return made

    def put(made: Any) -> None:
        sys.modules["ladder_test_plugin"] = made

    def function(x: Any) -> Any:
        try:
            import ladder_test_plugin
            from ladder_test_plugin import scale
        except ImportError as error:
            return type(error).__name__
        return ladder_test_plugin.run(x) + scale

    put(module(2.0))
    return steps(
        function,
        *(None, None, lambda: put(module(3.0)), None, lambda: put(None), lambda: put(module(2.0))),
        *(
            lambda: vars(sys.modules["ladder_test_plugin"]).pop("scale", None),
            lambda: sys.modules.pop("ladder_test_plugin", None),
        ),
    )


def _built_ins_added() -> World:
    def function(x: Any) -> Any:
        try:
            return x * ladder_test_factor
        except NameError:
            builtins.ladder_test_factor = 3.0
            return x

    def remove() -> None:
        vars(builtins).pop("ladder_test_factor", None)

    remove()
    return steps(
        function, *(None, None, lambda: setattr(builtins, "ladder_test_factor", 5.0), None, remove, remove)
    )


def _caches_of_calls() -> World:
    layer = nn.Linear(3, 3).requires_grad_(False)
    made: list[Any] = []

    @functools.lru_cache(maxsize=2)
    def table(n: int, kind: Any = None) -> Any:
        made.append(n)
        return torch.arange(float(n))

    @functools.cache
    def of(module: Any, x: Any) -> Any:
        return module(x) + len(made)

    def function(x: Any, n: int) -> Any:
        return (
            of(layer, x),
            of(layer, x) is of(layer, x),
            table(n) * table(n, kind=layer),
            table.cache_info()[:2],
        )

    kept = normal(2, 3)
    return World(
        function,
        [
            *((None, lambda n=n: (kept, n)) for n in (3, 3, 4)),
            (lambda: layer.weight.mul_(2), lambda: (kept, 5)),
            (of.cache_clear, lambda: (kept, 5)),
            (table.cache_clear, lambda: (normal(2, 3), 3)),
        ],
        lambda: (made.copy(), of.cache_info()),
    )


def _kept_weakly() -> World:
    class Owner:
        pass

    owners: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    held = [Owner(), Owner()]

    def function(x: Any) -> Any:
        for owner in held:
            owners[owner] = owners.get(owner, 0) + 1
        gc.collect()
        proxy = weakref.proxy(held[0])
        proxy.scale = getattr(proxy, "scale", 1.0) + 1
        return x * len(owners) + held[0].scale, sorted(owners.values())

    return steps(
        function, *(None, None, lambda: held.append(Owner()), None, lambda: held.insert(0, Owner()), None)
    )


def _finalized() -> World:
    log: list[Any] = []

    class Handle:
        def __init__(self, x: Any, name: str) -> None:
            self.x, self.name = x, name

        def __del__(self) -> None:
            log.append(self.name)
            self.x.add_(1)

    def function(x: Any, n: int) -> Any:
        handle = Handle(x, f"a{n}")
        y = x * 2
        if n:
            handle = None
        z = x * 3
        handle = Handle(z, "z")
        log.append("end")
        return y, z, x * 1

    return calls(function, *[lambda n=n: (normal(3), n) for n in (0, 1, 0, 2, 1)], observe=log.copy)


def _tensors_of_a_class() -> World:
    log: list[str] = []

    class Logged(torch.Tensor):
        scale = 2.0

        @classmethod
        def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            log.append(getattr(function, "__name__", "?"))
            result = super().__torch_function__(function, kinds, args, kwargs or {})
            if isinstance(result, Logged):
                result.note = len(log)
            return result

    def function(x: Any, n: int) -> Any:
        y = x.as_subclass(Logged) * Logged.scale
        z = torch.relu(y) + y.note
        return z if n % 2 else z.as_subclass(torch.Tensor), type(z).__name__, z.note, len(log)

    def make(n: int) -> Any:
        return lambda: (normal(3) if n < 3 else normal(3).as_subclass(Logged), n)

    return calls(function, *map(make, (0, 1, 2, 3, 4, 1)), observe=log.copy)


def _hooks_put_inside() -> World:
    layer = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).requires_grad_(False)
    log: list[Any] = []

    def function(x: Any, n: int) -> Any:
        handle = layer[0].register_forward_hook(lambda m, i, o: log.append(o.shape) or o + n)
        before = layer[1].register_forward_pre_hook(lambda m, i: (i[0] - 1,))
        y = layer(x)
        handle.remove()
        if n != 2:
            before.remove()
        return y, layer(x), len(layer[1]._forward_pre_hooks)

    return calls(function, *[lambda n=n: (normal(2, 3), n) for n in (1, 1, 2, 3, 1)], observe=log.copy)


def _keys_with_own_equality() -> World:
    class Name(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return hash(self.lower())

        def __eq__(self, other: Any) -> bool:
            asked.append(str(other))
            return self.lower() == str(other).lower()

    asked: list[str] = []
    table: dict[Any, float] = {Name("Scale"): 2.0}

    def function(x: Any, key: str) -> Any:
        return x * table.setdefault(Name(key), float(len(table) + 4)), Name(key) == "SCALE", len(table)

    keys = ("scale", "SCALE", "bias", "Scale", "BIAS")
    return calls(function, *[lambda k=k: (normal(3), k) for k in keys], observe=asked.copy)


programs_of(globals(), "patched")
