"""Branches on values of tensors, and all that may be on their sides."""

from __future__ import annotations

import collections
import dataclasses
import types
import weakref

import torch
from capture_world import World, calls, normal, program
from torch import nn


def shifted(number, size=3):
    """Return a call's arguments: one tensor whose sum changes its sign from call to call."""
    return lambda: ((normal(size, seed=number) * (1 if number % 2 else -1) + (number % 3 - 1)),)


def tensor(number=0, size=3):
    return lambda: normal(size, seed=number)


def given(*makers):
    return lambda: tuple(make() if callable(make) else make for make in makers)


@program
def branch_inside_module_stack():
    class G(nn.Module):
        def __init__(s, k):
            super().__init__()
            s.l = nn.Linear(3, 3)
            s.k = k

        def forward(s, x):
            y = s.l(x)
            if y.mean() > 0:
                return y * s.k
            return y - s.k

    torch.manual_seed(0)
    m = nn.Sequential(G(1), G(2), nn.ReLU())
    return calls(m, *[lambda i=i: (normal(2, 3, seed=i) * 3,) for i in range(14)])


@program
def branch_then_effects_after():
    log = []

    def fn(x):
        y = x * 2 if x.sum() > 0 else x * 3
        log.append(float(y.sum()) > 0)
        return y

    return calls(fn, *[shifted(i) for i in range(8)], observe=lambda: list(log))


@program
def branch_sets_attribute():
    class C:
        pass

    c = C()
    c.hot = None

    def fn(x):
        if x.sum() > 0:
            c.hot = x * 2
            c.tag = "hot"
        else:
            c.hot = None
            c.tag = "cold"
        return c.hot, c.tag

    return calls(fn, *[shifted(i) for i in range(8)], observe=lambda: vars(c))


@program
def branch_same_object_identity():
    def fn(x, y):
        z = x if x.sum() > y.sum() else y
        return z, z is x, z is y, (z, x, y)

    t = normal(3)
    return calls(
        fn,
        *[lambda i=i: (normal(3, seed=i), normal(3, seed=i + 5)) for i in range(6)],
        lambda: (t, t),
        lambda: (t, normal(3, seed=3)),
    )


@program
def branch_views_written_later():
    def fn(x):
        v = x[:2] if x.sum() > 0 else x[1:]
        v.add_(10)
        return v, x

    return calls(fn, *[shifted(i) for i in range(8)])


@program
def branch_on_grad_tensor():
    w = nn.Parameter(torch.ones(3))

    def fn(x):
        y = x * w
        if y.sum() > 0:
            z = (y**2).sum()
        else:
            z = y.abs().sum()
        z.backward()
        return z.detach()

    return calls(fn, *[shifted(i) for i in range(8)], observe=lambda: w.grad)


@program
def branch_dtype_dependent():
    def fn(x):
        if (x > 0).any():
            return x.to(torch.float64)
        return x.half()

    return calls(
        fn,
        *[shifted(i) for i in range(8)],
        lambda: (torch.arange(3) - 1,),
        lambda: (torch.zeros(3),),
        lambda: (torch.arange(3),),
    )


@program
def branch_subclass_and_plain():
    class T(torch.Tensor):
        pass

    def fn(x):
        return x * 2 if x.sum() > 0 else x - 1

    return calls(
        fn,
        shifted(1),
        shifted(2),
        lambda: (normal(3).as_subclass(T),),
        shifted(3),
        lambda: (-normal(3).abs().as_subclass(T),),
        shifted(4),
    )


@program
def branch_exception_in_one_side_caught():
    def fn(x):
        try:
            if x.sum() > 0:
                return x[5]
            return x * 2
        except IndexError as e:
            return str(e)

    return calls(fn, *[shifted(i) for i in range(8)])


@program
def branch_two_in_expression():
    def fn(x, y):
        return (x if x.max() > 1 else -x) + (y if y.min() < 0 else y * 2), bool(x.sum() > 0) ^ bool(
            y.sum() > 0
        )

    return calls(fn, *[lambda i=i: (normal(3, seed=i) * 2, normal(3, seed=i + 30)) for i in range(16)])


@program
def branch_recursive_function():
    def f(x, d):
        if d == 0:
            return x
        if x.sum() > 0:
            return f(x * 0.5, d - 1)
        return f(x + 1, d - 1)

    return calls(lambda x: (f(x, 2),), *[shifted(i) for i in range(12)])


@program
def branch_dataclass_state():
    @dataclasses.dataclass
    class St:
        h: torch.Tensor
        n: int = 0

    def fn(st, x):
        if x.norm() > 1.5:
            st = St(st.h + x, st.n + 1)
        else:
            st = dataclasses.replace(st, h=st.h * 0.9)
        return st

    return calls(fn, *[lambda i=i: (St(normal(3, seed=i), 2), normal(3, seed=i + 3)) for i in range(10)])


@program
def branch_list_result_append():
    def fn(xs, acc):
        best = None
        for x in xs:
            if best is None or x.sum() > best.sum():
                best = x
        acc.append(best)
        return best

    acc = []
    return calls(
        fn,
        *[
            lambda i=i: ([normal(2, seed=i), normal(2, seed=i + 1), normal(2, seed=i + 2)], acc)
            for i in range(8)
        ],
        observe=lambda: list(acc),
    )


@program
def branch_weakref_arg():
    class H:
        pass

    h = H()
    h.v = 1.5
    r = weakref.ref(h)

    def fn(x):
        o = r()
        if o is None:
            return x
        return x * o.v if x.sum() > 0 else x - o.v

    def ch():
        h.v = 2.5

    A = shifted
    return World(
        fn, [(None, A(0)), (None, A(1)), (None, A(3)), (None, A(4)), (ch, A(0)), (None, A(1)), (None, A(3))]
    )


@program
def branch_patched_between():
    m = types.SimpleNamespace(f=torch.relu, g=torch.abs, k=2)

    def fn(x):
        return m.f(x) * m.k if x.sum() > 0 else m.g(x) - m.k

    def p1():
        m.g = torch.neg

    def p2():
        m.k = 5

    A = shifted
    return World(
        fn,
        [
            (None, A(0)),
            (None, A(1)),
            (None, A(3)),
            (None, A(4)),
            (p1, A(0)),
            (None, A(1)),
            (None, A(2)),
            (p2, A(0)),
            (None, A(1)),
            (None, A(2)),
            (None, A(3)),
        ],
    )


@program
def closures_counter_and_branch():
    n = 0

    def bump():
        nonlocal n
        n += 1
        return n

    def fn(x):
        k = bump()
        if x.sum() > 0:
            return x * k
        return x - k

    return calls(fn, *[given(tensor(i)) for i in range(8)], observe=lambda: n)


@program
def branch_with_list_built():
    def fn(xs):
        out = []
        for x in xs:
            if x.sum() > 0:
                out.append(x * 2)
            else:
                out.append(-x)
        return out, torch.stack(out)

    return calls(
        fn,
        *[
            lambda i=i: ([normal(3, seed=i), normal(3, seed=i + 10), normal(3, seed=i + 20)],)
            for i in range(10)
        ],
    )


@program
def early_exit_layers():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.l = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
            s.stat = collections.Counter()

        def forward(s, x):
            for i, l in enumerate(s.l):
                x = torch.tanh(l(x))
                if x.abs().max() < 0.6:
                    s.stat[i] += 1
                    return x, i
            s.stat["end"] += 1
            return x, -1

    torch.manual_seed(1)
    m = M()
    return calls(
        m, *[lambda i=i: (normal(1, 3, seed=i) * (i % 3),) for i in range(12)], observe=lambda: dict(m.stat)
    )


@program
def nan_guard_raise():
    def check(x, name):
        if torch.isnan(x).any():
            raise FloatingPointError(f"{name}: {int(torch.isnan(x).sum())} NaN")
        return x

    def fn(x):
        return check(check(x, "in").log(), "out")

    return calls(
        fn, *[lambda i=i: (normal(3, seed=i).abs() if i % 4 else normal(3, seed=i),) for i in range(12)]
    )


@program
def clip_grad_like():
    def fn(ps, m):
        total = torch.stack([p.norm() for p in ps]).norm()
        if total > m:
            for p in ps:
                p.mul_(m / total)
        return total

    return calls(fn, *[lambda i=i: ([normal(3, seed=i) * (i % 3), normal(2, seed=i)], 1.5) for i in range(8)])


@program
def branch_while_newton():
    def fn(a):
        x = a
        n = 0
        while (x * x - a).abs().max() > 1e-3 and n < 20:
            x = 0.5 * (x + a / x)
            n += 1
        return x, n

    return calls(fn, *[lambda i=i: (torch.tensor([1.0 + i, 2.0]),) for i in (1, 1, 2, 2, 30, 1, 2)])


@program
def branch_nonlocal_and_global_lists():
    seen = []

    def fn(x):
        def pos():
            seen.append("p")
            return x.exp()

        def neg():
            return x.neg()

        f = pos if x.sum() > 0 else neg
        return f()

    return calls(fn, *[shifted(i) for i in range(8)], observe=lambda: list(seen))


@program
def branch_in_comprehension_and_generator():
    def pick(xs):
        for x in xs:
            if x.sum() > 0:
                yield x

    def fn(a, b, c):
        return (
            [t * 2 if t.max() > 1 else t for t in (a, b, c)],
            list(pick((a, b, c))),
            sum(1 for t in (a, b, c) if t.min() < -1),
        )

    return calls(
        fn, *[lambda i=i: (normal(3, seed=i), normal(3, seed=i + 7), normal(3, seed=i + 9)) for i in range(8)]
    )


def before_a_known_branch(change, observe=None):
    """Return a world with a branch, and one behind it whose value is known if both are in one segment."""

    def fn(x):
        state = types.SimpleNamespace(made=x * 1, items=[1], number=0)
        known = torch.ones(3)
        y = x * 2 if x.sum() > 0 else x
        if known.all():
            change(state)
        return y + state.made, state.items, state.number

    same = [shifted(1) for _ in range(4)]
    return calls(fn, *same, *[shifted(i) for i in range(8)], observe=observe)


@program
def branch_before_one_that_writes_outside():
    buffer = torch.zeros(3)
    return before_a_known_branch(lambda state: buffer.add_(1), buffer.clone)


@program
def branch_before_one_that_draws():
    return before_a_known_branch(lambda state: state.items.append(torch.rand(3)))


@program
def branch_before_one_that_gathers_gradients():
    weight = nn.Parameter(torch.ones(3))
    return before_a_known_branch(lambda state: (weight * 2).sum().backward(), lambda: weight.grad.clone())


@program
def branch_before_one_that_writes_what_was_made():
    return before_a_known_branch(lambda state: state.made.add_(1))


@program
def branch_before_one_that_grows_a_list():
    return before_a_known_branch(lambda state: state.items.append(2))


@program
def branch_before_one_that_sets_an_attribute():
    return before_a_known_branch(lambda state: setattr(state, "number", state.number + 1))


@program
def branch_before_one_that_grows_a_list_of_another():
    kept = [1]

    def change(state):
        state.items = kept
        state.items.append(2)

    return before_a_known_branch(change, kept.copy)
