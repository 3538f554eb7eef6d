"""More functions without tensors: classes, generators, statements, handlers, builtins."""

from __future__ import annotations

import base64
import functools
import inspect
import keyword
import operator
import os
import pathlib
import struct
import sys
import uuid
import warnings
import weakref
import zlib

from programs_library import library


@library
def metaclasses(n):
    class Meta(type):
        def __getattr__(c, k):
            return k * n

        def __len__(c):
            return 7

    class A(metaclass=Meta):
        __slots__ = ("z",)

        def __init_subclass__(c, **k):
            c.k = k

        def __class_getitem__(c, i):
            return i

    class B(A, q=n):
        pass

    return A.foo, len(A), B.k, A[3], B.bar


@library
def descriptors(n):
    class P:
        def __init__(s):
            s._x = 1

        @property
        def x(s):
            return s._x

        @x.setter
        def x(s, v):
            s._x = v * n

        @x.deleter
        def x(s):
            s._x = "del"

        @functools.cached_property
        def y(s):
            return [s._x]

        @functools.lru_cache
        def z(s, k):
            return k + s._x

        @functools.singledispatchmethod
        def w(s, a):
            return "o"

        @w.register
        def _(s, a: int):
            return "i"

    p = P()
    p.x = 5
    r = [p.x, p.y, p.y is p.y, p.z(2), p.z(2), p.w(1), p.w("s")]
    del p.x
    r.append(p.x)
    return r


@library
def generator_protocol(n):
    def gen():
        try:
            r = yield 1
            while True:
                r = yield (r or 0) * n
        except ValueError:
            yield "ve"
        finally:
            log.append("fin")

    log = []
    g = gen()
    out = [next(g), g.send(2), g.send(3), g.throw(ValueError)]
    g.close()
    return out, log


@library
def decorators(n):
    def d(f):
        @functools.wraps(f)
        def w(*a, **k):
            calls.append((f.__name__, a, tuple(k)))
            return f(*a, **k)

        return w

    calls = []

    @d
    def add(a, b=n):
        return a + b

    return add(1), add(1, b=2), calls, add.__name__, add.__wrapped__(1)


@library
def statements(n):
    a = [1, 2, 3]
    a[1:] = [n]
    b = a * 2
    b += [9]
    x, *y = b
    (p, q), r = (1, 2), 3
    s = {*a, *b}
    m = {**{"a": 1}, "b": n}
    i = j = 0
    while i < 10:
        i += 1
        if i % 2:
            continue
        j += i
        if j > 10:
            break
    else:
        j = -1
    del a[0]
    z = [k for k in range(n) if k % 2 for l in range(k)]
    w = {k: v for k, v in m.items()}
    return (
        a,
        b,
        x,
        y,
        p,
        q,
        r,
        sorted(s),
        m,
        i,
        j,
        z,
        w,
        not a,
        -n,
        ~n,
        +n,
        a is b,
        1 < n < 5,
        n if n else 0,
        f"{n:03d}{n!r:>4}{n=}",
    )


@library
def handlers(n):
    out = []
    for k in range(4):
        try:
            if k == 0:
                1 / 0
            if k == 1:
                [][1]
            if k == 2:
                raise KeyError("a") from ValueError("b")
            out.append("ok")
        except ZeroDivisionError as e:
            out.append(str(e))
        except (IndexError, TypeError) as e:
            out.append(type(e).__name__)
        except Exception as e:
            out.append(repr(e.__cause__))
            try:
                raise
            except KeyError as e2:
                out.append(e2 is e)
        else:
            out.append("else")
        finally:
            out.append(k)
    try:
        try:
            raise ValueError(1)
        finally:
            out.append("x")
    except ValueError as e:
        out.append(e.args)

    def g():
        for i in range(3):
            try:
                if i == n:
                    return i
                continue
            finally:
                out.append(i * 10)

    out.append(g())
    return out


@library
def exception_context(n):
    e = None
    try:
        raise ValueError("a")
    except ValueError as ex:
        try:
            raise KeyError("b")
        except KeyError as ey:
            e = ey
    return repr(e.__context__), e.__cause__, e.__suppress_context__, sys.exc_info()


@library
def paths(n):
    return (
        pathlib.PurePosixPath("/a/b") / str(n),
        (pathlib.PurePosixPath("/a/b.c")).suffix,
        os.path.join("a", "b"),
        os.path.relpath("/a/b", "/a"),
        os.fspath(pathlib.PurePath("q")),
    )


@library
def binary_data(n):
    return (
        zlib.crc32(b"a" * n),
        struct.pack("<hi", n, 2),
        base64.b64encode(b"xyz" * n),
        uuid.UUID(int=n).hex,
        keyword.iskeyword("if"),
        inspect.signature(paths).parameters["n"].name,
        inspect.getdoc(len)[:5],
        callable(paths),
    )


@library
def weak_references(n):
    w = weakref.WeakValueDictionary()

    class O:
        pass

    o = O()
    w["a"] = o
    s = weakref.WeakSet([o])
    k = weakref.WeakKeyDictionary({o: n})
    return len(w), len(s), k[o], w["a"] is o


@library
def recorded_warnings(n):
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        warnings.warn("x", DeprecationWarning)
        return [str(i.message) for i in w]


@library
def builtins_at_large(n):
    nums = [5, 3, n]
    nums.sort(key=lambda v: -v)
    d = sorted({"b": 1, "a": n}.items(), key=operator.itemgetter(1), reverse=True)
    return (
        nums,
        d,
        min("abc", key=ord),
        max([1, n], default=0),
        sum([[1], [n]], []),
        sum(x * x for x in range(n)),
        any(x > 2 for x in nums),
        all([]),
        list(map(lambda a, b: a + b, [1, 2], [n, 4])),
        list(filter(None, [0, n])),
        list(reversed([1, n])),
        list(enumerate("ab", n)),
        dict(zip("ab", [1, n])),
        list(zip(*[[1, 2], [3, n]])),
        divmod(n, 2),
        pow(n, 2, 5),
        round(n / 3, 2),
        abs(-n),
        chr(97 + n),
        hex(n),
        isinstance(n, (int, str)),
        issubclass(bool, int),
        hash("a") == hash("a"),
        [*range(n, 0, -1)],
        slice(n).indices(9),
        functools.reduce(lambda a, b: a * b, [1, 2, n]),
        functools.partial(pow, n)(2),
        operator.attrgetter("real")(n),
        str(n).zfill(3),
        "%d-%s" % (n, "a"),
        bytes([n]),
        bytearray(b"a"),
        memoryview(b"ab")[0],
        complex(n, 1),
        float("inf") > n,
        int("7", 8),
        (n).bit_length(),
        "a,b".partition(","),
        type("X", (), {"a": n}).a,
    )
