"""Programs whose surroundings change between calls, or are changed by them, or are shared."""

from __future__ import annotations

import collections
import types

import torch
import torch.nn.functional as F
from capture_world import World, calls, normal, program
from torch import nn


@program
def closure_counter():
    def make():
        n = 0

        def fn(x):
            nonlocal n
            n += 1
            return x * n

        def peek():
            return n

        return fn, peek

    fn, peek = make()
    return calls(fn, *[lambda: (normal(3),)] * 5, observe=lambda: peek())


@program
def global_counter():
    g = {"__builtins__": __builtins__, "torch": torch}
    exec("k=0\ndef fn(x):\n    global k\n    k+=1\n    return x+k", g)
    return calls(g["fn"], *[lambda: (normal(3),)] * 4, observe=lambda: g["k"])


@program
def default_dtype_changed():
    def fn(x):
        return x + torch.ones(3), torch.zeros(2)

    return World(
        fn,
        [
            (lambda: torch.set_default_dtype(torch.float32), lambda: (normal(3),)),
            (lambda: torch.set_default_dtype(torch.float64), lambda: (torch.ones(3, dtype=torch.float32),)),
            (lambda: torch.set_default_dtype(torch.float32), lambda: (normal(3),)),
        ],
    )


@program
def grad_mode_outside():
    p = nn.Parameter(normal(3))

    def fn(x):
        return (x * p).sum(), torch.is_grad_enabled()

    return World(
        fn,
        [
            (None, lambda: (normal(3),)),
            (lambda: torch.set_grad_enabled(False), lambda: (normal(3),)),
            (lambda: torch.set_grad_enabled(True), lambda: (normal(3),)),
        ],
    )


@program
def train_eval_switch():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    return World(
        m,
        [
            (lambda: torch.manual_seed(1), lambda: (normal(4, 4),)),
            (lambda: m.eval(), lambda: (normal(4, 4),)),
            (lambda: m.train(), lambda: (normal(4, 4),)),
            (None, lambda: (normal(4, 4),)),
        ],
    )


@program
def hooks_added():
    m = nn.Linear(3, 3)
    log = []
    with torch.no_grad():
        m.weight.fill_(1.0)
        m.bias.fill_(0.0)

    def hook(mod, i, o):
        log.append(o.shape)
        return o * 2

    h = []
    return World(
        m,
        [
            (None, lambda: (normal(2, 3),)),
            (lambda: h.append(m.register_forward_hook(hook)), lambda: (normal(2, 3),)),
            (lambda: h[0].remove(), lambda: (normal(2, 3),)),
            (lambda: m.register_forward_pre_hook(lambda mod, i: (i[0] + 1,)), lambda: (normal(2, 3),)),
        ],
        observe=lambda: list(log),
    )


@program
def param_replaced_and_half():
    m = nn.Linear(3, 3)
    with torch.no_grad():
        m.weight.fill_(1.0)
        m.bias.fill_(0.0)
    return World(
        m,
        [
            (None, lambda: (normal(2, 3),)),
            (lambda: setattr(m, "weight", nn.Parameter(torch.full((3, 3), 2.0))), lambda: (normal(2, 3),)),
            (lambda: m.double(), lambda: (normal(2, 3).double(),)),
            (lambda: m.weight.data.zero_(), lambda: (normal(2, 3).double(),)),
        ],
    )


@program
def outer_state_changes():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.names = ["a", "b"]
            s.cfg = {"k": 1, "n": {"z": 2}}
            s.tags = {"q"}
            s.t = (1, [2])
            s.o = types.SimpleNamespace(v=3)
            s.ls = [nn.Identity(), nn.ReLU()]
            s.od = collections.OrderedDict(a=1, b=2)
            s.register_buffer("b", torch.ones(1))

        def forward(s, x):
            for l in s.ls:
                x = l(x)
            return (
                x * len(s.names) + s.cfg["k"] * s.cfg["n"]["z"] + s.t[1][0] * s.o.v + s.b,
                sorted(s.tags),
                list(s.od),
                s.names[-1],
                s.training,
            )

    m = M()
    A = lambda: (normal(3),)
    return World(
        m,
        [
            (None, A),
            (lambda: m.names.append("c"), A),
            (lambda: m.cfg.update(k=4), A),
            (lambda: m.cfg["n"].update(z=5), A),
            (lambda: m.tags.add("r"), A),
            (lambda: m.t[1].__setitem__(0, 9), A),
            (lambda: setattr(m.o, "v", 7), A),
            (lambda: m.ls.reverse(), A),
            (lambda: m.od.move_to_end("a"), A),
            (lambda: m.b.add_(2), A),
            (lambda: setattr(m, "names", ["zz"]), A),
            (lambda: m.eval(), A),
            (lambda: setattr(m, "cfg", {"k": 1, "n": {"z": 2}}), A),
            (lambda: setattr(m, "o", types.SimpleNamespace(v=1)), A),
            (lambda: setattr(m, "b", torch.zeros(1)), A),
            (lambda: m.ls.append(nn.Tanh()), A),
        ],
    )


@program
def class_patched_later():
    class B:
        k = 1

        def f(s, x):
            return x + s.k

    class C(B):
        tab = {}
        reg = []

    c = C()
    A = lambda: (normal(3),)

    def fn(x):
        return c.f(x) * len(C.tab) + len(c.reg), hasattr(c, "zz"), c.k

    class D(B):
        tab = {"q": 1}
        reg = [1]

        def f(s, x):
            return x * 100

    return World(
        fn,
        [
            (None, A),
            (lambda: C.tab.update(a=1), A),
            (lambda: C.reg.append(2), A),
            (lambda: setattr(C, "k", 7), A),
            (lambda: setattr(C, "__getattr__", lambda s, n: 5), A),
            (lambda: ("__getattr__" in vars(C)) and delattr(C, "__getattr__"), A),
            (lambda: setattr(C, "f", lambda s, x: x * 9), A),
            (lambda: ("f" in vars(C)) and delattr(C, "f"), A),
            (lambda: setattr(c, "f", lambda x: x - 1), A),
            (lambda: c.__dict__.clear(), A),
            (lambda: setattr(c, "__class__", D), A),
            (lambda: setattr(B, "k", 50), A),
        ],
    )


@program
def function_rebound():
    def g(x, k=2):
        return x * k

    ns = {"g": g}

    def fn(x):
        return g(x)

    def h(x, k=2):
        return x - k

    A = lambda: (normal(3),)
    return World(
        fn,
        [
            (None, A),
            (lambda: setattr(g, "__defaults__", (5,)), A),
            (lambda: setattr(g, "__code__", h.__code__), A),
            (None, A),
        ],
    )


@program
def closure_changed_outside():
    k = 1
    f = lambda x: x

    def fn(x):
        return f(x) * k

    def setk(v):
        nonlocal k
        k = v

    def setf(v):
        nonlocal f
        f = v

    A = lambda: (normal(3),)
    return World(
        fn,
        [
            (None, A),
            (lambda: setk(2), A),
            (lambda: setf(lambda x: x + 1), A),
            (lambda: setk(torch.ones(3)), A),
            (lambda: setk("no"), A),
        ],
    )


@program
def requires_grad_toggled():
    l = nn.Linear(3, 3)
    with torch.no_grad():
        l.weight.fill_(1.0)
        l.bias.fill_(0.0)

    def fn(x):
        y = l(x)
        return y, y.requires_grad, l.weight.requires_grad

    A = lambda: (normal(2, 3),)
    return World(
        fn,
        [
            (None, A),
            (lambda: l.requires_grad_(False), A),
            (lambda: l.requires_grad_(True), A),
            (lambda: torch.set_grad_enabled(False), A),
            (lambda: l.requires_grad_(False), A),
            (lambda: torch.set_grad_enabled(True), A),
            (lambda: l.requires_grad_(True), A),
        ],
    )


@program
def grad_reenabled_inside():
    def fn(x):
        with torch.enable_grad():
            y = x * 2
            return y.requires_grad, y

    A = lambda: (normal(3).requires_grad_(),)
    B = lambda: (normal(3),)
    return World(
        fn,
        [
            (lambda: torch.set_grad_enabled(False), A),
            (None, B),
            (None, A),
            (lambda: torch.set_grad_enabled(True), A),
        ],
    )


@program
def global_state_left_changed():
    def fn(x):
        torch.set_grad_enabled(not torch.is_grad_enabled())
        return x * 2

    A = lambda: (normal(3).requires_grad_(),)
    return World(
        fn,
        [
            (lambda: torch.set_grad_enabled(True), A),
            (None, A),
            (None, A),
            (lambda: torch.set_grad_enabled(True), A),
        ],
        observe=torch.is_grad_enabled,
    )


@program
def decorated_no_grad():
    @torch.no_grad()
    def g(x):
        return x * 2

    @torch.inference_mode()
    def h(x):
        return x * 3

    return calls(
        lambda x: (g(x), h(x), h(x).is_inference(), torch.is_grad_enabled()),
        lambda: (normal(3).requires_grad_(),),
        lambda: (normal(3).requires_grad_(),),
    )


@program
def delattr_reappear():
    class O:
        pass

    o = O()
    o.a = 1

    def fn(x):
        if hasattr(o, "a"):
            del o.a
            o.b = [x]
        else:
            o.a = 2
            del o.b
        return x * len(vars(o)), sorted(vars(o))

    return calls(fn, *[lambda: (normal(3),)] * 4, observe=lambda: dict(vars(o)))


@program
def descriptor_and_class_state():
    class Cnt:
        def __set_name__(self, o, n):
            self.n = "_" + n

        def __get__(self, i, o):
            return getattr(i, self.n, 0)

        def __set__(self, i, v):
            setattr(i, self.n, v + 1)

    class A:
        c = Cnt()
        total = 0
        reg = []

    a = A()

    def fn(x):
        a.c = a.c + 1
        A.total += 1
        A.reg.append(a.c)
        return x * a.c

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: (a._c, A.total, list(A.reg)))


@program
def args_alias_lists():
    def fn(a, b, x):
        a.append(1)
        b.append(2)
        return x * len(a), a is b, a == b

    def same():
        l = []
        return (l, l, normal(3))

    return calls(fn, lambda: ([], [], normal(3)), same, lambda: ([], [], normal(3)), same)


@program
def arg_is_global():
    store = {"l": []}

    def fn(l, x):
        l.append(1)
        store["l"].append(2)
        return x * len(l)

    return calls(
        fn,
        lambda: (store["l"], normal(3)),
        lambda: ([], normal(3)),
        lambda: (store["l"], normal(3)),
        observe=lambda: list(store["l"]),
    )


@program
def instance_dict_alias():
    class O:
        pass

    o = O()
    o.k = 1

    def fn(d, x):
        d["k"] = 5
        return x * o.k

    return calls(fn, lambda: ({}, normal(3)), lambda: (vars(o), normal(3)), lambda: ({}, normal(3)))


@program
def same_object_two_ways():
    l = []

    class O:
        pass

    o = O()
    o.l = l

    def fn(x, a):
        a.append(1)
        l.append(2)
        o.l.append(3)
        return x * len(l), a is l, a is o.l

    return calls(
        fn,
        lambda: (normal(3), l),
        lambda: (normal(3), []),
        lambda: (normal(3), o.l),
        lambda: (normal(3), [7]),
        observe=lambda: list(l),
    )


@program
def tensor_attr_and_grad():
    p = nn.Parameter(torch.ones(3))

    def fn(x):
        if p.grad is None:
            return x * p, "none"
        return x * p.grad, "some"

    def back():
        (p * 2).sum().backward()

    A = lambda: (normal(3),)
    return World(
        fn,
        [
            (None, A),
            (back, A),
            (None, A),
            (lambda: setattr(p, "grad", None), A),
            (lambda: setattr(p, "grad", torch.ones(3)), A),
        ],
    )


@program
def activation_argument():
    return calls(
        lambda x, act: act(x) + 1,
        lambda: (normal(3), F.relu),
        lambda: (normal(3), F.gelu),
        lambda: (normal(3), torch.sin),
        lambda: (normal(3), torch.cos),
        lambda: (normal(3), lambda t: t * 2),
        lambda: (normal(3), lambda t: t * 3),
        lambda: (normal(3), nn.Tanh()),
        lambda: (normal(3), nn.ReLU()),
    )


@program
def method_argument():
    l = [1, 2]
    return calls(
        lambda x, f: (x * len(l), f(0)),
        lambda: (normal(3), l.append),
        lambda: (normal(3), l.pop),
        lambda: (normal(3), l.append),
        lambda: (normal(3), l.count),
        lambda: (normal(3), l.index),
        observe=lambda: list(l),
    )
