"""Programs that fail, catch, warn and log."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import types
import warnings
from collections import deque

import torch
from capture_world import World, calls, normal, program


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
def dict_changed_size_error():
    def fn(x, d):
        for k in d:
            d[k + "x"] = 1
        return x

    return calls(fn, lambda: (normal(3), {}), lambda: (normal(3), {}))


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
def int_division_by_zero():
    def fn(x, a, log):
        log.append(a)
        return x * (10 / a)

    return calls(fn, *[(lambda v=v: (normal(3), v, [])) for v in (1, 2, 3, 4, 0, 5)])


@program
def assert_fails():
    def fn(x, n):
        assert n < 3, f"bad {n}"
        return x * n

    w = calls(fn, lambda: (normal(3), 1), lambda: (normal(3), 2))
    return w


@program
def error_inside_no_grad():
    def fn(x, i):
        with torch.no_grad():
            y = x[i]
        return y * 2

    A = lambda: (normal(3), torch.tensor([0]))
    B = lambda: (normal(3), torch.tensor([7]))
    return World(fn, [(None, A), (None, A), (None, B), (None, A)], observe=torch.is_grad_enabled)


@program
def exceptions_to_caller():
    class E(Exception):
        def __init__(s, a, b):
            super().__init__(f"{a}-{b}")
            s.a = a

        def __str__(s):
            return "E" + super().__str__()

    def fn(x, n, log):
        log.append(n)
        if n == 1:
            raise E(n, x.dim())
        if n == 2:
            raise StopIteration(3)
        if n == 3:
            return [1][5]
        if n == 4:
            return {}["zz"]
        if n == 5:
            return x.nope
        if n == 6:
            return undefined_name
        if n == 7:
            return x + torch.ones(7)
        if n == 8:
            return len(5)
        if n == 9:
            return fn()
        if n == 10:
            raise ValueError
        if n == 11:
            return int("q")
        return x

    return calls(fn, *[(lambda i=i: (normal(3), i, [])) for i in (0, 1, 10, 11, 0, 1, 10, 11)])


@program
def exceptions_odd():
    def fn(x, n, log):
        log.append(n)
        if n == 3:
            return [1][5]
        if n == 4:
            return {}["zz"]
        if n == 5:
            return x.nope
        if n == 7:
            return x + torch.ones(7)
        if n == 8:
            return len(5)
        if n == 9:
            return fn(1)
        return x

    return calls(
        lambda x, n, log: [fn(x, n, log)] if n not in (3, 4, 5, 7, 8, 9) else _safe(fn, x, n, log),
        *[(lambda i=i: (normal(3), i, [])) for i in (0, 3, 4, 5, 7, 8, 9, 3, 4, 5, 7, 8, 9)],
    )


@program
def control_flow_zoo():
    def fn(x, n):
        out = []
        for i in range(n):
            if i == 3:
                break
            if i % 2:
                continue
            out.append(i)
        else:
            out.append("else")
        while n > 0:
            n -= 1
            if n == 7:
                break
        else:
            out.append("welse")
        try:
            try:
                out[99]
            except IndexError:
                out.append("ix")
                raise KeyError("q") from None
            finally:
                out.append("f1")
        except (KeyError, ValueError) as e:
            out.append(repr(e))
        else:
            out.append("no")

        def k():
            try:
                return 1
            finally:
                out.append("f2")

        a, *b, (c, d) = [1, 2, 3, (4, 5)]
        z = 1 if 0 < n < 5 else 2
        return x * k(), out, b, c + d, z, (lambda *a, **k: (a, k))(1, *[2], q=3, **{"w": 4})

    return calls(fn, *[(lambda i=i: (normal(3), i)) for i in (2, 9, 4, 0, 2)])


@program
def warning_registry():
    def fn(x):
        warnings.warn("careful")
        return x * 2

    seen = []

    def show(m, c, f, l, *a, **k):
        seen.append((str(m), c.__name__, l > 0))

    def setup():
        warnings.simplefilter("default")
        warnings.showwarning = show
        globals().pop("__warningregistry__", None)

    return World(
        fn,
        [(setup, lambda: (normal(3),)), (None, lambda: (normal(3),)), (None, lambda: (normal(3),))],
        observe=lambda: list(seen),
    )


@program
def warn_and_stacklevel():
    def fn(x):
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            warnings.warn("hm", stacklevel=1)
            return x, str(w[0].message), w[0].lineno > 0, w[0].filename.endswith(".py")

    return calls(fn, lambda: (normal(3),), lambda: (normal(3),))


@program
def logging_with_place():
    lg = logging.getLogger("adv.place")
    lg.handlers[:] = []
    buf = io.StringIO()
    h = logging.StreamHandler(buf)
    h.setFormatter(logging.Formatter("%(funcName)s %(lineno)d %(filename)s %(message)s"))
    lg.addHandler(h)
    lg.setLevel(10)
    lg.propagate = False

    def inner(x):
        lg.info("in %d", x.dim())
        return x

    def fn(x):
        lg.warning("w")
        lg.debug("d")
        return inner(x) * 2

    return calls(fn, lambda: (normal(3),), lambda: (normal(3),), lambda: (normal(3),), observe=buf.getvalue)


def _safe(fn, *a):
    try:
        return fn(*a)
    except Exception as e:
        return type(e).__name__, str(e)[:40]


@program
def handler_reads_what_nothing_else_does():
    def fn(x, name, number):
        try:
            return os.stat(name).st_mode > 0
        except OSError:
            return x * number

    return calls(fn, *[lambda: (normal(3), "/no such file", 3)] * 2, lambda: (normal(3), "/", 3))


@program
def messages_name_types_as_natives_do():
    def fn(x, left, right, which):
        x = x * 2
        if which == "operator":
            return x, left % right
        if which == "comparison":
            return x, left < right
        if which == "unpacked":
            first, second = left
            return x, first, second
        with left:
            return x

    class Mine:
        pass

    pairs = [(types.SimpleNamespace(), 2), (deque(), Mine()), (3, Mine()), (Mine(), types.SimpleNamespace())]
    kinds = ("operator", "comparison", "unpacked", "context")
    return calls(
        fn,
        *(lambda pair=pair, which=which: (normal(3), *pair, which) for pair in pairs for which in kinds),
    )
