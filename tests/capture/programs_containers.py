"""Programs that change containers and objects, and programs that make containers of all kinds."""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, deque, namedtuple

import torch
from capture_world import World, calls, normal, program
from torch import nn

Pair = namedtuple("Pair", "lo hi")


class ModelOutput(OrderedDict):
    """HF-like ModelOutput: attribute and index access"""

    def __getattr__(self, k):
        try:
            return self[k]
        except KeyError:
            raise AttributeError(k)

    def __setattr__(self, k, v):
        self[k] = v

    def to_tuple(self):
        return tuple(self[k] for k in self.keys())

    def __getitem__(self, k):
        return super().__getitem__(k) if isinstance(k, str) else self.to_tuple()[k]


@program
def list_append_into_arg():
    """forward appends a tensor to a caller's list (feature-pyramid style)"""

    def fn(x, feats):
        y = x * 2
        feats.append(y)
        return y.sum()

    return calls(fn, lambda: (normal(3), []), lambda: (normal(3, seed=1), [normal(3)]))


@program
def list_arg_returned_alias():
    """the mutated argument is also the result: identity must hold"""

    def fn(x, feats):
        feats.append(x + 1)
        feats[0] = x
        return feats

    return calls(
        fn, lambda: (normal(3), [normal(3, seed=2)]), lambda: (normal(3, seed=1), [normal(3, seed=3)])
    )


@program
def dict_update_and_pop_arg():
    def fn(x, d):
        d.update(y=x + 1, n=len(d))
        d.setdefault("k", []).append(x)
        old = d.pop("old", None)
        return x * (0 if old is None else old)

    return calls(fn, lambda: (normal(3), {"old": 2}), lambda: (normal(3), {"k": []}))


@program
def module_feature_cache():
    """hook-less feature cache: self.features = {...} of live tensors, read by the user afterwards"""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.l = nn.Linear(4, 4)
            self.features = {}

        def forward(self, x):
            self.features["in"] = x
            h = self.l(x).relu()
            self.features["h"] = h
            return h.sum()

    m = M()
    return calls(
        m,
        lambda: (normal(2, 4),),
        lambda: (normal(2, 4, seed=5),),
        observe=lambda: {k: v.detach().clone() for k, v in m.features.items()},
    )


@program
def kv_cache_object():
    """user cache class with list of tensors, cat'ed in place each step (HF DynamicCache style)"""

    class Cache:
        def __init__(self):
            self.k, self.n = [], 0

        def update(self, k, layer):
            if len(self.k) <= layer:
                self.k.append(k)
            else:
                self.k[layer] = torch.cat([self.k[layer], k], dim=0)
            self.n += 1
            return self.k[layer]

    c = Cache()

    def fn(x, cache):
        return cache.update(x, 0).sum() + cache.update(x * 2, 1).sum()

    return calls(
        fn,
        lambda: (normal(2, 3), c),
        lambda: (normal(2, 3, seed=1), c),
        lambda: (normal(2, 3, seed=2), c),
        observe=lambda: ([t.clone() for t in c.k], c.n),
    )


@program
def aliased_tensor_args():
    """f(x, y) mutating x: called with x is y first, then distinct tensors"""

    def fn(x, y):
        x.add_(1)
        return y * 2

    def same():
        t = normal(3)
        return (t, t)

    return calls(fn, same, lambda: (normal(3), normal(3)), same)


@program
def del_attr_and_item():
    class S:
        pass

    s = S()

    def fn(x, d):
        s.tmp = x + 1
        y = s.tmp * d["a"]
        del s.tmp
        del d["a"]
        return y

    return calls(
        fn,
        lambda: (normal(3), {"a": 2, "b": 1}),
        lambda: (normal(3), {"a": 3, "b": 1}),
        observe=lambda: sorted(vars(s)),
    )


@program
def monkeypatched_class_method():
    class A:
        def act(self, x):
            return x.relu()

    a = A()

    def fn(x):
        return a.act(x) + 1

    def patch():
        A.act = lambda self, x: x.sigmoid()

    return World(fn, [(None, lambda: (normal(3),)), (patch, lambda: (normal(3),))])


@program
def deque_in_out():
    def fn(x, q):
        q.append(x)
        if len(q) > 2:
            q.popleft()
        q.rotate(1)
        return q, sum(q)

    return calls(
        fn,
        lambda: (normal(3), deque([normal(3, seed=1), normal(3, seed=2)], maxlen=4)),
        lambda: (normal(3), deque()),
    )


@program
def counter_output():
    def fn(x, toks):
        c = Counter(toks)
        c.update(["b"])
        return x * c["a"], c, c.most_common(1)

    return calls(fn, lambda: (normal(3), ["a", "b", "a"]), lambda: (normal(3), ["b"]))


@program
def namedtuple_output():
    def fn(p):
        q = p._replace(hi=p.hi + p.lo)
        return Pair(lo=q.lo * 2, hi=q.hi), q._asdict(), Pair._fields

    return calls(fn, lambda: (Pair(normal(3), normal(3, seed=1)),))


@program
def dict_subclass_modeloutput():
    def fn(x):
        o = ModelOutput(loss=x.sum(), logits=x)
        o.aux = o.logits * 2
        return o, o[1] + o.aux

    return calls(fn, lambda: (normal(3),), lambda: (normal(3, seed=1),))


@program
def set_ops_and_frozenset_keys():
    def fn(x, tags):
        keep = (set(tags) & {"a", "b"}) | {"z"}
        d = {frozenset(keep): x, ("t", 1): x + 1}
        return d[frozenset(keep)] * len(keep), sorted(keep), d

    return calls(fn, lambda: (normal(3), ["a", "q"]), lambda: (normal(3), ["a", "b"]))


@program
def methods_of_tuples():
    def fn(x, items):
        names = fn.__code__.co_varnames
        pair = (x, items)
        place = names.index("items") + (1, 2, 1).count(1) + frozenset({"a", "b"}).isdisjoint({"c"})
        return pair.__getitem__(0) * place, frozenset({1, 2}).union({3}), (len(items), "b").index("b")

    return calls(fn, lambda: (normal(3), [1]), lambda: (normal(3), [1, 2]))


@program
def named_tuples_compared():
    def fn(p, other):
        if sys.version_info >= (3, 15) or p == other:
            return x + 1
        return x * (Pair(1, 2) < p) + (Pair(1, 2) == (1, 2)) + (sys.version_info[0] > 2)

    x = normal(3)
    pairs = (Pair(1, 3), (1, 3)), (Pair(1, 2), Pair(2, 1)), (Pair(1, 3), (1, 2)), (Pair(0, 3), (1, 2))
    return calls(fn, *[lambda pair=pair: pair for pair in pairs])


@program
def copied_deeply():
    class Config:
        def __init__(self, names):
            self.names, self.pair, self.sizes = names, (1, "a"), OrderedDict(b=[1], a=(2, [3]))
            self.fixed = frozenset({"x"}), {"y": {1, 2}}

    def fn(x, config):
        other = copy.deepcopy(config)
        other.names.add("z")
        other.sizes["a"][1].append(4)
        return x * len(other.names), other, copy.deepcopy((config.pair, config.pair, 7))

    return calls(fn, *[lambda names=names: (normal(3), Config({*names})) for names in ("ab", "ab", "c")])


@program
def copied():
    class Config:
        def __init__(self, names):
            self.names, self.sizes = names, OrderedDict(b=1)

    class Counted(Config):
        def __copy__(self):
            return Counted([*self.names, "copied"])

    class Kept(Config):
        def __getstate__(self):
            return {"names": [*self.names, "kept"], "sizes": None}

    class Fixed:
        __slots__ = ("names", "sizes")
        __init__ = Config.__init__

    def fn(x, kind, names):
        config = kind(names)
        other = copy.copy(config)
        other.names, shared = [*other.names, 1], other.names is names
        listed, sized = copy.copy(config.names), copy.copy(config.sizes)
        listed.append(2)
        sized["c"] = 3
        same = copy.copy((listed,)), copy.copy(frozenset(names)), copy.copy(None), copy.copy(kind)
        return (
            x * len(other.names),
            config.names,
            other.names,
            shared,
            listed,
            sized,
            same[:3],
            same[3] is kind,
        )

    kinds = (Config, Config, Counted, Kept, Fixed, Config)
    return calls(fn, *[lambda kind=kind: (normal(3), kind, ["a", "b"]) for kind in kinds])


def _doubled(x):
    return x * 2


def _raised(x):
    return x + 1


@program
def keyed_by_functions():
    names = {_doubled: "doubled", _raised: "raised", "other": 3}
    some = {_doubled, _raised}

    def fn(x, chosen):
        y = chosen(x)
        if chosen in names:
            y = y + len(names[chosen])
        if chosen in some and names.get(_raised) == "raised":
            y = y * 3
        known = {chosen: 1}
        known[_raised] = len(known)
        return y + known[chosen], [name for name in names if name in some][0](x), {names[f] for f in some}

    first, second = (lambda chosen=chosen: (normal(3), chosen) for chosen in (_doubled, _raised))
    rename = lambda: names.update({_doubled: "two"})
    return World(
        fn, [(None, first), (None, second), (rename, first), (lambda: some.discard(_raised), second)]
    )


class _Part:
    pass


@program
def keyed_by_objects_in_tuples():
    parts = [_Part() for _ in range(3)]

    def fn(x, part):
        held, order = {}, {}
        for at, each in enumerate(parts):
            held[each, 0], held[each, 1], order[(each, parts[0]), "both"] = x * at, x + at, at
        for each in parts:
            held[each, 0] = held[each, 1] + held[each, 0]
        last = held.pop((parts[2], 1))
        found = [(each, at) in held for each in (*parts, part) for at in (0, 1, 2)]
        return torch.stack([*held.values()]), last, found, [at for _, at in held], sorted(order.values())

    return calls(
        fn, *[lambda part=part: (normal(3), part) for part in (parts[0], parts[0], parts[1], _Part())]
    )


@program
def looked_for_among_objects():
    parts, layers = [_Part() for _ in range(3)], torch.nn.ModuleList([torch.nn.Tanh(), torch.nn.ReLU()])

    def fn(x, part, other):
        y = x + (part in parts) + 2 * (part not in (other, 1, "a")) + 4 * (other in parts[1:])
        return y, layers[1] in list(layers), layers[0] in (layers[1],), _Part() in parts

    given = ((0, 1), (0, 1), (0, 0), (1, 0), (2, 2), (0, 1))
    return calls(fn, *[lambda a=a, b=b: (normal(3), parts[a], parts[b]) for a, b in given])
