"""Exceptions, their chains and tracebacks; generators and context managers that see them."""

from __future__ import annotations

import contextlib
import sys
import traceback

from capture_world import calls, normal, normals, program
from torch import nn


def err(e):
    if e is None:
        return None
    return (
        type(e).__name__,
        repr(e.args),
        getattr(e, "__notes__", None),
        e.__suppress_context__,
        err(e.__cause__),
        err(e.__context__),
        {k: repr(v) for k, v in vars(e).items() if k != "__notes__"},
        getattr(e, "name", None) if isinstance(e, (NameError, AttributeError, ImportError)) else None,
    )


@program
def cause_and_context():
    def fn(x, k):
        try:
            if k == 0:
                raise KeyError("a")
            if k == 1:
                raise ValueError("v", 3)
            {}["zz"]
        except KeyError as e:
            err_ = RuntimeError("outer")
            err_.extra = {"n": x.dim()}
            err_.add_note("note")
            raise err_ from e
        except ValueError:
            raise TypeError("during")

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 2, 0, 1, 2)])


@program
def cause_none():
    def fn(x, k):
        try:
            [].pop()
        except IndexError as e:
            e.add_note(f"n{k}")
            if k:
                raise ValueError(str(x.shape)) from None
            raise

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 0, 1)])


@program
def caught_error_inspected():
    log = []

    def inner(x):
        try:
            raise ValueError("a")
        except ValueError as e:
            raise KeyError("b") from e

    def fn(x):
        try:
            inner(x)
        except KeyError as e:
            log.append(
                (
                    type(e.__cause__).__name__,
                    e.__cause__.args,
                    e.__suppress_context__,
                    e.__context__ is e.__cause__,
                )
            )
            return x * len(log), e.args

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: list(log))


@program
def traceback_text():
    log = []

    def boom(x):
        return x.undefined_thing

    def fn(x):
        try:
            boom(x)
        except AttributeError as e:
            log.append([f.name for f in traceback.extract_tb(e.__traceback__)])
            log.append(traceback.format_exc().count("boom"))
        return x + 1

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: list(log))


@program
def traceback_of_raised():
    log = []

    def boom(x, k):
        if k:
            raise ValueError("x")
        return x

    def fn(x, k):
        return boom(x * 2, k)

    w = calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 1, 0, 1)], observe=lambda: list(log))
    return w


@program
def same_exception_instance_reraised():
    E = ValueError("shared")

    def fn(x, k):
        y = x * 2
        if k:
            raise E
        return y

    return calls(
        fn,
        *[lambda k=k: (normal(3), k) for k in (0, 1, 1, 0, 1)],
        observe=lambda: (E.args, E.__cause__, E.__context__ is None, E.__traceback__ is None),
    )


@program
def exception_kept():
    kept = []

    def fn(x, k):
        try:
            if k:
                raise KeyError(k)
        except KeyError as e:
            kept.append(e)
            e.seen = x
        return x * len(kept)

    return calls(
        fn,
        *[lambda k=k: (normal(3), k) for k in (0, 1, 1, 0, 1)],
        observe=lambda: [(type(e).__name__, e.args, e.seen.sum()) for e in kept],
    )


@program
def finally_overrides():
    log = []

    def fn(x, k):
        for i in range(5):
            try:
                log.append(i)
                if i == k:
                    return x * i
                if i == 1:
                    continue
                if i == 3:
                    break
            finally:
                log.append(-i)
                if k == 7:
                    return x - 1
        else:
            log.append("else")
        return x

    return calls(
        fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 2, 3, 7, 0, 2, 9)], observe=lambda: list(log)
    )


@program
def finally_swallow():
    def fn(x, k):
        try:
            try:
                if k:
                    raise ValueError("gone")
                return x
            finally:
                x.add_(1)
                if k == 2:
                    return x * 3
        except ValueError:
            return x * 7

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 2, 2, 0, 1)])


@program
def generator_context_manager_throws():
    log = []

    @contextlib.contextmanager
    def cm(a):
        log.append(("in", a))
        try:
            yield a * 2
        except KeyError as e:
            log.append(("caught", e.args))
        finally:
            log.append(("out", a))

    def fn(x, k):
        with cm(k) as a, cm(k + 1) as b:
            if k == 1:
                raise KeyError(k)
            if k == 2:
                raise ValueError("no")
            return x * a + b
        return x

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 2, 1, 0, 2)], observe=lambda: list(log))


@program
def exit_sees_exception():
    log = []

    class C:
        def __enter__(s):
            return s

        def __exit__(s, t, v, tb):
            log.append((t.__name__ if t else None, str(v), tb is None))
            return t is KeyError

    def fn(x, k):
        with C():
            if k == 1:
                raise KeyError("x")
            if k == 2:
                x.nope()
            x = x + 1
        return x

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 2, 1, 0, 2)], observe=lambda: list(log))


@program
def except_star():
    def fn(x, k):
        out = []
        try:
            raise ExceptionGroup("g", [ValueError(1), TypeError(2)] + ([KeyError(3)] if k else []))
        except* ValueError as e:
            out.append(len(e.exceptions))
        except* TypeError as e:
            out.append("t")
        return x * 2, out

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 0, 1)])


@program
def exc_info_nested():
    def who():
        t, v, _ = sys.exc_info()
        return (t.__name__ if t else None, str(v))

    def fn(x, k):
        out = [who()]
        try:
            if k:
                raise ValueError(k)
        except ValueError:
            out.append(who())
            try:
                1 // 0
            except ZeroDivisionError:
                out.append(who())
            out.append(who())
        out.append(who())
        return x * 2, out

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 0, 1)])


@program
def metaclass_instancecheck_in_except():
    class M(type):
        def __instancecheck__(c, i):
            return True

        def __subclasscheck__(c, i):
            return True

    class E(Exception, metaclass=M):
        pass

    def fn(x):
        try:
            raise ValueError("v")
        except E:
            return x, "wrong"
        except ValueError:
            return x * 2, "right"

    return calls(fn, *[lambda: (normal(3),)] * 3)


@program
def stop_iteration_values():
    def g(n):
        got = []
        try:
            for i in range(n):
                got.append((yield i))
        except GeneratorExit:
            got.append("exit")
            raise
        except ValueError as e:
            got.append(str(e))
            yield "caught"
        return got

    def fn(x, n):
        it = g(n)
        out = []
        try:
            out.append(next(it))
            out.append(it.send("s"))
            out.append(it.throw(ValueError("t")))
            next(it)
        except StopIteration as e:
            out.append(("stop", e.value))
        it.close()
        return x * len(out), out

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (3, 1, 3, 2)])


@program
def generator_suspended_across_calls():
    def g():
        total = 0
        while True:
            got = yield total
            total += 1 if got is None else got

    it = g()
    next(it)

    def fn(x, k):
        a = next(it)
        b = it.send(k)
        return x * a + b

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (3, 1, 3, 2)])


@program
def generator_made_in_call_kept():
    store = {}

    def fn(x, k):
        def g():
            n = 0
            while True:
                n += 1
                yield x * n

        if "it" not in store:
            store["it"] = g()
        return next(store["it"]) + k

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (3, 1, 3, 2)])


@program
def raised_again_from_where_it_was_called():
    def again():
        raise

    def generated():
        try:
            raise
        except KeyError as error:
            yield repr(error)
        yield sys.exc_info()[1] is None

    def fn(x):
        try:
            raise KeyError("a")
        except KeyError:
            found = list(generated())
            try:
                again()
            except KeyError as error:
                return found, repr(error), repr(error.__context__), x + 1

    return calls(fn, *[normals(3)] * 3)


@program
def errors_of_attributes_name_them():
    class Asked:
        def __getattr__(self, name):
            raise AttributeError()

    class Owner:
        @property
        def field(self):
            raise AttributeError("mine")

        @property
        def other(self):
            return self.missing

    class Named:
        def __getattribute__(self, name):
            raise AttributeError("x", name="own", obj=5)

    layer = nn.Linear(1, 1)

    def fn(x):
        found = []
        for owner, name in (
            (Asked(), "a"),
            (Owner(), "field"),
            (Owner(), "other"),
            (Named(), "b"),
            (layer, "c"),
        ):
            try:
                getattr(owner, name)
            except AttributeError as error:
                found.append((str(error), error.name, type(error.obj).__name__))
        return found, hasattr(layer, "d"), x + 1

    return calls(fn, *[normals(3)] * 3)


@program
def classes_refuse_arguments():
    class Plain:
        pass

    class Passing:
        def __init__(self, *args):
            object.__init__(self, *args)

    class Answering:
        def __init__(self):
            return 5

    def fn(x):
        found = []
        for make in (
            *(lambda: Passing(1), lambda: Plain().__init__(1), lambda: Answering(), lambda: super(Plain).x),
            *(lambda: Plain().__setattr__("a"), lambda: Plain.__subclasses__(1), lambda: Plain(1)),
        ):
            try:
                found.append(make())
            except (AttributeError, TypeError) as error:
                found.append(str(error))
        return found, x + 1

    return calls(fn, *[normals(3)] * 3)


@program
def tracebacks_given():
    def traced():
        try:
            raise OSError()
        except OSError as error:
            return error.__traceback__

    def fn(x):
        trace = traced()
        try:
            raise IndexError().with_traceback(trace)
        except IndexError as error:
            return error.__traceback__ is trace, error.__traceback__.tb_next is trace, x + 1

    return calls(fn, *[normals(3)] * 3)
