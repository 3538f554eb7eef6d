"""More programs, against the assumptions of capture: what a wrong guard or mock would get wrong."""

from __future__ import annotations

import contextlib
import enum
import math

import torch
from capture_world import World, calls, normal, program
from torch import nn


@program
def loop_with_print():
    torch.manual_seed(0)
    ls = [nn.Linear(3, 3) for _ in range(3)]

    def fn(x):
        for i, l in enumerate(ls):
            x = l(x)
            print("layer", i, float(x.sum()) > 0)
        return x

    return calls(fn, lambda: (normal(2, 3),), lambda: (normal(2, 3, seed=1),))


@program
def try_except_index():
    def fn(x, i):
        try:
            return x[i]
        except IndexError as e:
            return x * 0, type(e).__name__
        finally:
            x.add_(1)

    return calls(fn, lambda: (normal(3), 1), lambda: (normal(3), 7), lambda: (normal(3), 2))


@program
def data_dependent_index_error():
    def fn(x, idx, log):
        log.append("a")
        x.mul_(2)
        log.append("b")
        y = x[idx]
        log.append("c")
        return y

    return calls(
        fn,
        lambda: (normal(4), torch.tensor([1, 2]), []),
        lambda: (normal(4), torch.tensor([0, 3]), []),
        lambda: (normal(4), torch.tensor([0, 9]), []),
        lambda: (normal(4), torch.tensor([1, 1]), []),
    )


@program
def caught_data_error():
    def fn(x, idx):
        try:
            y = x[idx]
        except IndexError:
            y = x * 0
        return y + 1

    return calls(
        fn,
        lambda: (normal(4), torch.tensor([1, 2])),
        lambda: (normal(4), torch.tensor([0, 9])),
        lambda: (normal(4), torch.tensor([0, 1])),
        lambda: (normal(4), torch.tensor([0, 9])),
    )


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
def view_alias_mutation():
    def fn(x):
        v = x[1:]
        v.mul_(3)
        w = x.view(-1)
        w[0] = 7
        return v, w, x.t() if x.dim() == 2 else x

    return calls(fn, lambda: (normal(4),), lambda: (normal(4, seed=2),))


@program
def returns_closure():
    def fn(x):
        y = x + 1

        def g(z):
            return y * z

        return g(x), g

    return calls(fn, lambda: (normal(3),), lambda: (normal(3, seed=1),))


@program
def returns_generator():
    def fn(x):
        return (x * i for i in range(3))

    def outer(x):
        return list(fn(x)), sum(fn(x))

    return calls(outer, lambda: (normal(3),), lambda: (normal(3, seed=1),))


@program
def live_generator_returned():
    def gen(x):
        for i in range(3):
            yield x * i

    def fn(x):
        g = gen(x)
        first = next(g)
        return first, g

    w = calls(
        lambda x: (lambda r: (r[0], list(r[1])))(fn(x)), lambda: (normal(3),), lambda: (normal(3, seed=1),)
    )
    return w


@program
def live_generator_returned2():
    def gen(x):
        for i in range(3):
            yield x * i

    hold = []

    def fn(x):
        g = gen(x)
        first = next(g)
        hold.append(g)
        return first

    return calls(
        fn, lambda: (normal(3),), lambda: (normal(3, seed=1),), observe=lambda: [list(g) for g in hold]
    )


@program
def mutate_while_iterating():
    def fn(x, l):
        for e in l:
            if e < 3:
                l.append(e + 1)
        d = {k: k * 2 for k in l}
        for k in list(d):
            if k % 2:
                del d[k]
        return x * len(l), d

    return calls(fn, lambda: (normal(3), [1]), lambda: (normal(3), [1]), lambda: (normal(3), [2, 5]))


@program
def dict_changed_size_error():
    def fn(x, d):
        for k in d:
            d[k + "x"] = 1
        return x

    return calls(fn, lambda: (normal(3), {}), lambda: (normal(3), {}))


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
def backward_inside():
    l = nn.Linear(3, 1)
    with torch.no_grad():
        l.weight.fill_(1.0)
        l.bias.fill_(0.0)

    def fn(x):
        loss = l(x).sum()
        loss.backward()
        with torch.no_grad():
            for p in l.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return loss.detach()

    return calls(
        fn, *[lambda: (normal(2, 3),)] * 4, observe=lambda: [p.detach().clone() for p in l.parameters()]
    )


@program
def optimizer_step():
    torch.manual_seed(0)
    l = nn.Linear(3, 1)
    o = torch.optim.Adam(l.parameters(), lr=0.1)

    def fn(x):
        o.zero_grad()
        loss = l(x).pow(2).mean()
        loss.backward()
        o.step()
        return loss.item()

    return calls(
        fn, *[lambda: (normal(2, 3),)] * 4, observe=lambda: [p.detach().clone() for p in l.parameters()]
    )


@program
def batchnorm_training():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2))
    return calls(
        m,
        *[lambda: (normal(2, 2, 8, 8),)] * 3,
        observe=lambda: (m[1].running_mean.clone(), int(m[1].num_batches_tracked)),
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
def user_exception_class():
    class E(Exception):
        def __init__(self, a):
            super().__init__(a)
            self.a = a

    def fn(x, n, log):
        try:
            if n > 2:
                raise E(n)
            log.append("ok")
        except E as e:
            log.append(("caught", e.a))
            x = x + e.a
        else:
            log.append("else")
        finally:
            log.append("fin")
        return x

    return calls(
        fn,
        lambda: (normal(3), 1, []),
        lambda: (normal(3), 4, []),
        lambda: (normal(3), 5, []),
        lambda: (normal(3), 1, []),
    )


@program
def context_manager_user():
    log = []

    class C:
        def __enter__(self):
            log.append("in")
            return self

        def __exit__(self, t, v, tb):
            log.append(("out", t.__name__ if t else None))
            return t is ValueError

    @contextlib.contextmanager
    def cm(k):
        log.append(k)
        try:
            yield k * 2
        finally:
            log.append("done")

    def fn(x, bad):
        with C() as c, cm(3) as k:
            y = x * k
            if bad:
                raise ValueError("no")
            return y
        return x

    return calls(
        fn, lambda: (normal(3), 0), lambda: (normal(3), 1), lambda: (normal(3), 0), observe=lambda: list(log)
    )


@program
def exception_group_chain():
    def fn(x, d):
        try:
            return x * d["k"]
        except KeyError as e:
            raise RuntimeError("missing") from e

    return calls(fn, lambda: (normal(3), {"k": 1}), lambda: (normal(3), {}), lambda: (normal(3), {}))


@program
def enum_flags():
    class C(enum.Enum):
        A = 1
        B = 2

        def scale(self):
            return self.value * 10

    def fn(x, c):
        return x * c.scale(), c is C.A, C(2), c.name

    return calls(fn, lambda: (normal(3), C.A), lambda: (normal(3), C.B))


@program
def slots_class():
    class S:
        __slots__ = ("a", "b")

        def __init__(self, a):
            self.a = a

        def __eq__(self, o):
            return isinstance(o, S) and self.a == o.a

        def __hash__(self):
            return hash(self.a)

        def __add__(self, o):
            return S(self.a + (o.a if isinstance(o, S) else o))

        __radd__ = __add__

        def __bool__(self):
            return self.a > 0

        def __len__(self):
            return 3

        def __getitem__(self, i):
            return self.a + i

        def __contains__(self, i):
            return i == self.a

        def __call__(self, x):
            return x * self.a

        def __iter__(self):
            return iter([self.a, self.a + 1])

    s = S(2)

    def fn(x, n):
        s.b = n
        t = s + n + s
        u = 1 + s
        q = [*t]
        return t(x), t == S(t.a), len(t), t[2], n in t, bool(t), hasattr(s, "zz"), u.a, q, {s: 1}[S(2)]

    return calls(
        fn, lambda: (normal(3), 1), lambda: (normal(3), 2), lambda: (normal(3), -9), observe=lambda: s.b
    )


@program
def shape_dependent():
    def fn(x):
        b, *r = x.shape
        if b > 2:
            x = x[:2]
        return x.reshape(x.shape[0], -1).sum(-1), b, r

    return calls(
        fn,
        lambda: (normal(3, 2, 2),),
        lambda: (normal(1, 2, 2),),
        lambda: (normal(5, 4, 1),),
        lambda: (normal(2, 2, 2),),
    )


@program
def contiguity_identity():
    def fn(x):
        y = x.contiguous()
        return y is x, y, x.to(torch.float32) is x, x.float()

    return calls(fn, lambda: (normal(3, 3),), lambda: (normal(3, 3).t(),), lambda: (normal(3, 3).double(),))


@program
def nonzero_shapes():
    def fn(x):
        i = x.nonzero()
        n = i.shape[0]
        y = x[x > 0]
        return y.sum() * n, len(y), i.size(0) * 2

    return calls(
        fn,
        lambda: (torch.tensor([1.0, 0, -1]),),
        lambda: (torch.tensor([1.0, 3, -1]),),
        lambda: (torch.tensor([0.0, 0, 0]),),
    )


@program
def item_in_shape():
    def fn(x, n):
        k = int(n.item())
        return torch.zeros(k) + x[:k], list(range(k))

    return calls(
        fn,
        lambda: (normal(5), torch.tensor(2)),
        lambda: (normal(5), torch.tensor(4)),
        lambda: (normal(5), torch.tensor(2)),
    )


@program
def float_identity_nan():
    def fn(x, a):
        return x * a, a == a, a if a != a else 0, [a] == [a]

    return calls(
        fn,
        lambda: (normal(3), float("nan")),
        lambda: (normal(3), 0.0),
        lambda: (normal(3), -0.0),
        lambda: (normal(3), 1.5),
    )


@program
def varying_float_neg_zero():
    def fn(x, a):
        return x * a, math.copysign(1, a), a > 0, f"{a:.2f}"

    return calls(
        fn,
        *[
            (lambda v=v: (normal(3), v))
            for v in (1.0, 2.0, 3.0, 0.0, -0.0, 5.0, float("inf"), float("nan"), 7.0)
        ],
    )


@program
def varying_int_types():
    def fn(x, a):
        return (
            x * a,
            a // 2,
            a % 3,
            a**2,
            -a,
            a & 1,
            a << 1,
            str(a),
            a == 3,
            x[:a].shape if 0 <= a < 3 else None,
        )

    return calls(fn, *[(lambda v=v: (normal(3), v)) for v in (1, 2, 3, 4, 5, True, 2.0, 7, -3, 10**20, 2)])


@program
def int_division_by_zero():
    def fn(x, a, log):
        log.append(a)
        return x * (10 / a)

    return calls(fn, *[(lambda v=v: (normal(3), v, [])) for v in (1, 2, 3, 4, 0, 5)])


@program
def nested_functions_defaults():
    def fn(x, *a, k=2, **kw):
        def g(y, /, z=3, *, w=k):
            return y * z + w

        return g(x, *a), g(x, w=1), kw, a

    return calls(fn, lambda: (normal(3),), lambda: (normal(3), 5))


@program
def list_ops():
    def fn(x, l):
        l += [x]
        l.extend(range(2))
        l.insert(0, "a")
        l.reverse()
        q = l.pop()
        l[1:2] = [7, 8]
        del l[0]
        m = l * 2
        n = l + [1]
        m.sort(key=str)
        return l, q, len(m), n[::2], m.count(7), [1, 2] == [1, 2], l.index(7)

    return calls(fn, lambda: (normal(3), [1, 2]), lambda: (normal(3), [1, 2]), lambda: (normal(3), []))


@program
def dict_ops():
    def fn(x, d):
        d |= {"z": 1}
        e = {**d, "q": x}
        for k in sorted(d):
            e[k] = d[k]
        e.pop("q")
        return (
            list(e.items()),
            d.get("nope", 5),
            e.setdefault("s", []),
            e,
            min(d.values()),
            "z" in d,
            dict.fromkeys("ab", 0),
            [*d],
            e.keys() & {"z"},
            d.popitem(),
        )

    return calls(
        fn,
        lambda: (normal(3), {"a": 1}),
        lambda: (normal(3), {"a": 1}),
        lambda: (normal(3), {"b": 1, "a": 3}),
    )


@program
def str_ops():
    def fn(x, s):
        return (
            x * len(s.split(",")),
            s.upper().encode().decode(),
            "%s-%d" % (s, 3),
            f"{1}{2}",
            s[::-1],
            ",".join(c for c in s if c != ","),
            s.startswith("a"),
            s * 2,
            s in "abc",
        )

    return calls(fn, lambda: (normal(3), "a,b"), lambda: (normal(3), "abc"))


@program
def super_and_mro():
    class A:
        def f(self, x):
            return x + 1

        @classmethod
        def make(cls, k):
            o = cls()
            o.k = k
            return o

        @staticmethod
        def st(x):
            return x * 3

    class B(A):
        def f(self, x):
            return super().f(x) * 2

    class C(A):
        def f(self, x):
            return super().f(x) - 5

    class D(B, C):
        def f(self, x):
            return super().f(x) + self.k

    def fn(x, k):
        d = D.make(k)
        return D.st(d.f(x)), type(d) is D, isinstance(d, A)

    return calls(fn, lambda: (normal(3), 1), lambda: (normal(3), 2))
