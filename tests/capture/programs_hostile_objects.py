"""Programs made to be run wrongly: descriptors, protocols, hooks."""

from __future__ import annotations

import functools
from collections import ChainMap, OrderedDict, defaultdict

import torch
from capture_world import World, calls, normal, program
from hostile_worlds import rows as _rows
from hostile_worlds import sizes as _sizes
from torch import nn


# ---- descriptors and protocols ---------------------------------------------------------------------------
class Counted:
    """A descriptor that counts its reads and scales by them."""

    def __set_name__(self, owner, name):
        self.key = "_" + name

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        instance.reads += 1
        return instance.__dict__[self.key] * instance.reads

    def __set__(self, instance, value):
        instance.__dict__[self.key] = value + 1


@program
def hostile_descriptors():
    class Holder:
        scale = Counted()

        def __init__(self):
            self.reads, self.scale = 0, 1

    holder = Holder()

    def f(x):
        y = x * holder.scale
        holder.scale = holder.scale % 5
        return y + holder.scale, "scale" in vars(holder)

    return _sizes(f, lambda n: (_rows(n),), observe=lambda: dict(vars(holder)))


@program
def hostile_descriptor_replaced():
    class Holder:
        rate = property(lambda self: 2.0)

    holder = Holder()

    def shadow():
        Holder.rate = property(lambda self: 3.0)

    def constant():
        Holder.rate = 4.0

    def own():
        holder.rate = 5.0

    def gone():
        del Holder.rate

    def back():
        Holder.rate = property(lambda self: 6.0)

    def f(x):
        return x * holder.rate

    ups = (None, None, shadow, None, constant, own, gone, None, back)
    return World(f, [(up, lambda: (_rows(2),)) for up in ups])


@program
def hostile_getattr_falls_back():
    class Lazy:
        def __init__(self):
            self.made = []

        def __getattr__(self, name):
            if name.startswith("w"):
                self.made.append(name)
                value = torch.full((4,), float(len(self.made)))
                object.__setattr__(self, name, value)
                return value
            raise AttributeError(name)

    lazy = Lazy()

    def forget():
        lazy.__dict__.pop("w1", None)

    def f(x, k):
        return x + getattr(lazy, f"w{k % 3}"), hasattr(lazy, "v"), getattr(lazy, "u", 7)

    steps = [(forget if k == 5 else None, functools.partial(lambda k: (_rows(2), k), k)) for k in range(9)]
    return World(f, steps, lambda: list(lazy.made))


@program
def hostile_mappings_that_look_elsewhere():
    first, second = {"a": 1.0}, {"a": 2.0, "b": 3.0}
    chain = ChainMap(first, second)
    made = defaultdict(lambda: len(made) + 0.5)

    def take():
        first.pop("a", None)

    def put():
        second["b"] = 9.0

    def f(x, k):
        return x * chain["a"] + chain["b"] + made[k], len(made), dict(chain)

    ups = (None, None, take, None, put, None, None, take, None)
    keys = (0, 1, 0, 1, 2, 2, 3, 0, 4)
    return World(
        f, [(up, lambda k=k: (_rows(2), k)) for up, k in zip(ups, keys, strict=True)], lambda: dict(made)
    )


@program
def hostile_operators_of_users():
    class Scale:
        def __init__(self, by):
            self.by, self.uses = by, 0

        def __rmul__(self, x):
            self.uses += 1
            return x * self.by + self.uses

        def __eq__(self, other):
            self.uses += 1
            return self.by == other

        __hash__ = None

        def __index__(self):
            return self.by

    scale = Scale(2)

    def change():
        scale.by += 1

    def f(x):
        y = x.__class__.__mul__(x, scale.by) if scale == 3 else scale.__rmul__(x)
        return y, x[:, scale], list(range(scale)), scale in (1, 2, 3)

    ups = (None, None, change, None, None, change.__call__, None, None, None)
    return World(f, [(up, lambda: (normal(3, 6),)) for up in ups], lambda: scale.uses)


@program
def hostile_module_with_call_replaced():
    class Layer(nn.Module):
        def forward(self, x):
            return x * 2

    layer = Layer()

    def forward():
        layer.forward = lambda x: x * 3

    def back():
        del layer.forward

    def of_class():
        Layer.__call__ = lambda self, x: x * 5

    def undo():
        del Layer.__call__

    def training():
        layer.train(not layer.training)

    def f(x):
        return layer(x) + layer.training

    ups = (None, None, forward, None, back, of_class, undo, training, None)
    return World(f, [(up, lambda: (_rows(2),)) for up in ups])


# ---- hooks ------------------------------------------------------------------------------------------------
@program
def hostile_hooks_come_and_go():
    layer, log, handles = nn.Linear(4, 4), [], []

    def before():
        handles.append(layer.register_forward_pre_hook(lambda m, args: (args[0] + 1,)))

    def after():
        handles.append(layer.register_forward_hook(lambda m, args, out: log.append(len(args)) or out * 2))

    def remove():
        handles.pop().remove()

    def everywhere():
        handles.append(nn.modules.module.register_module_forward_hook(lambda m, args, out: out - 1))

    def f(x):
        with torch.no_grad():
            return layer(x)

    ups = (None, None, before, after, None, remove, everywhere, remove, remove)
    return World(f, [(up, lambda: (_rows(2),)) for up in ups], lambda: list(log))


@program
def hostile_hook_that_removes_itself():
    layer, log = nn.Linear(4, 4), []

    def once():
        handle = layer.register_forward_hook(
            lambda m, args, out: (handle.remove(), log.append(1), out * 0)[2]
        )

    def f(x):
        with torch.no_grad():
            return layer(x), layer(x)

    ups = (None, None, once, None, None, once, once, None, None)
    return World(f, [(up, lambda: (_rows(2),)) for up in ups], lambda: list(log))


@program
def hostile_hook_writes_its_input():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    model[1].register_forward_pre_hook(
        lambda m, args: args[0].mul_(2) and None if False else args[0].mul_(2) * 0 + args[0]
    )
    model.register_forward_hook(lambda m, args, out: args[0].add_(1) * 0 + out)

    def f(x):
        with torch.no_grad():
            return model(x), x

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_gradient_hooks():
    log = []

    def f(x):
        x = x.detach().requires_grad_()
        y = x * 3
        y.register_hook(lambda g: log.append(float(g.sum())) or g * 2)
        (y * y).sum().backward()
        return x.grad, y.detach()

    return _sizes(f, lambda n: (_rows(n),), observe=lambda: list(log))


@program
def hostile_parametrized_weights():
    from torch.nn.utils import parametrizations, parametrize

    layer = nn.Linear(4, 4)

    class Doubled(nn.Module):
        def forward(self, w):
            return w * 2

    def doubled():
        parametrize.register_parametrization(layer, "weight", Doubled())

    def removed():
        parametrize.remove_parametrizations(layer, "weight")

    def normed():
        parametrizations.weight_norm(layer)

    def f(x):
        with torch.no_grad():
            return layer(x)

    ups = (None, None, doubled, None, removed, None, normed, None, None)
    return World(f, [(up, lambda: (_rows(2),)) for up in ups])


@program
def hostile_numbers_beside_keys_that_compare_by_code():
    asked = []

    class Key:
        def __init__(self, number):
            self.number = number

        def __hash__(self):
            return hash(self.number)

        def __eq__(self, other):
            asked.append(self.number)
            return isinstance(other, Key) and self.number == other.number

        def __repr__(self):
            return f"Key({self.number})"

    def fn(x, known, key):
        return x * known.get(key, 2), key in known, known.setdefault(key, 4), len(known)

    tensor = torch.arange(3)
    makers = [lambda: {Key(1): 3, tensor: 5}, lambda: {tensor: 5, 2: 6}, lambda: {Key(7): 8}]
    return calls(
        fn,
        *(
            lambda make=make, key=key: (normal(3), make(), key)
            for make in makers
            for key in (1, 2, True, None)
        ),
    )


@program
def hostile_variables_that_are_not_filled_yet():
    if False:
        scale = 0

    def fill(value):
        def set_it():
            nonlocal scale
            scale = value

        return set_it

    def empty():
        nonlocal scale
        del scale

    def fn(x):
        try:
            return x * scale
        except NameError as error:
            return x, str(error)

    return World(
        fn, [(each, lambda: (normal(3),)) for each in (None, fill(3), empty, fill(4), fill(5), empty)]
    )


@program
def hostile_globals_that_are_gone():
    def fn(x, deletes):
        global hostile_global
        try:
            if deletes:
                del hostile_global
            else:
                hostile_global = 3
        except NameError as error:
            return x * 2, str(error), error.name
        return x * 3

    return calls(fn, *(lambda deletes=deletes: (normal(3), deletes) for deletes in (1, 0, 0, 1, 1, 0, 1)))


@program
def hostile_arguments_that_cannot_be_spread():
    def inner(*items, first=0, **rest):
        return len(items), first, sorted(rest)

    def fn(x, items, named):
        try:
            return x * 2, inner(*items, **named)
        except TypeError as error:
            return x * 2, str(error)

    every = [(items, named) for items in ((), [1], 5, "ab") for named in ({}, {1: 2}, {"first": 1}, {"z": 1})]
    return calls(fn, *(lambda pair=pair: (normal(3), *pair) for pair in (*every, *every[::-1])))


@program
def hostile_pairs_that_make_dictionaries():
    def fn(x, pairs, how):
        known = {}
        match how:
            case "dict":
                known = dict(pairs)
            case "iterator":
                known = dict(iter(pairs))
            case "ordered":
                known = OrderedDict(pairs)
            case "update":
                known.update(pairs)
            case "updated":
                known.update(reversed(pairs))
            case "merged":
                known |= pairs
            case "keys":
                known = dict.fromkeys(pairs, 2)
        try:
            return x * sum(known.values()), list(known), (1, 2) in known, (1, 2) in pairs
        except TypeError as error:
            return x, str(error)

    pairs = [[(1, 2)], [(1, 5)], [("a", 2)], [[1, 7]], [((1, 2), 3)], [((1, 3), 3)], [(1, 2), (1, 3)]]
    pairs += [[(1,)], [(1, "b")], [(1, 2, 3)], []]
    ways = ("dict", "iterator", "ordered", "update", "updated", "merged", "keys")
    return calls(fn, *(lambda each=each, how=how: (normal(3), each, how) for how in ways for each in pairs))
