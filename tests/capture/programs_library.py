"""Functions of the language and its library, without tensors: the interpreter must be CPython."""

from __future__ import annotations

import argparse
import ast
import bisect
import calendar
import collections
import colorsys
import configparser
import contextlib
import csv
import dataclasses
import datetime
import decimal
import difflib
import enum
import fnmatch
import fractions
import functools
import graphlib
import heapq
import html
import io
import itertools
import json
import pprint
import queue
import random
import re
import reprlib
import shlex
import statistics
import string
import textwrap
import tokenize
import types
import typing
import urllib.parse

LIBRARY = []


def library(function):
    LIBRARY.append(function)
    return function


@library
def json_text(n):
    return (
        json.dumps({"a": [1, 2, {"b": n}], "c": None}, indent=1, sort_keys=True),
        json.JSONEncoder().encode([n, "x"]),
        json.JSONDecoder().decode('{"q":[1,2.5,null]}'),
    )


@library
def wrapping(n):
    return textwrap.fill("hello world foo bar " * n, 20), textwrap.TextWrapper(width=10).wrap(
        "a b c d e f g h i " * n
    )


@library
def differences(n):
    return list(
        difflib.unified_diff("a\nb\nc".split(), ("a\nx\nc" + "\nd" * n).split())
    ), difflib.SequenceMatcher(None, "abcd", "bcde").ratio()


@library
def averages(n):
    return (
        statistics.mean([1, 2, n]),
        statistics.stdev([1, 2, n, 5]),
        statistics.median([3, 1, n]),
        statistics.mode([1, 1, n]),
    )


@library
def fractions_and_decimals(n):
    return (
        fractions.Fraction(n, 6) + fractions.Fraction(1, 3),
        str(fractions.Fraction(3, n + 1)),
        decimal.Decimal(n) / 7,
    )


@dataclasses.dataclass(order=True)
class DC:
    a: int
    b: list = dataclasses.field(default_factory=list)
    c: str = "q"


@library
def data_classes(n):
    d = DC(n, [1, DC(2)])
    return (
        dataclasses.asdict(d),
        dataclasses.replace(d, a=5),
        d < DC(3),
        repr(d),
        dataclasses.fields(d)[0].name,
        dataclasses.astuple(d),
    )


@library
def chain_maps_and_counters(n):
    c = collections.ChainMap({"a": n}, {"b": 2})
    o = collections.OrderedDict(a=1)
    o["b"] = n
    o.move_to_end("a")
    ct = collections.Counter("hello" * n)
    ct.subtract("lo")
    u = collections.UserDict(a=1)
    u["q"] = n
    return (
        c["a"],
        c["b"],
        list(c),
        list(o.items()),
        ct.most_common(2),
        sorted((ct + ct).items()),
        dict(u),
        len(u),
        collections.UserList([1, n]) + [3],
    )


@library
def templates(n):
    return (
        string.Template("$a-${b}").substitute(a=n, b=2),
        string.Formatter().format("{0}-{x!r:>5}", n, x="k"),
        "abc".translate(str.maketrans("ab", "xy")),
    )


@library
def regular_expressions(n):
    return (
        re.sub(r"(\d+)", lambda m: str(int(m[1]) * n), "a1b22"),
        [m.group() for m in re.finditer("a.", "axayaz")],
        re.compile(r"(?P<k>\w)=(?P<v>\d)").search("q=3").groupdict(),
        re.split(",", f"a,{n}"),
    )


@library
def argument_parsing(n):
    p = argparse.ArgumentParser(prog="p")
    p.add_argument("--x", type=int, default=n)
    p.add_argument("y", nargs="*")
    a = p.parse_args(["--x", "3", "q", "r"])
    return a.x, a.y, vars(p.parse_args([]))


@library
def heaps_and_bisection(n):
    return (
        list(heapq.merge([1, 4, n], [2, 3])),
        heapq.nsmallest(2, [3, 1, n], key=lambda v: -v),
        bisect.bisect([1, 2, 3], n),
    )


@library
def seeded_random(n):
    r = random.Random(n)
    l = list(range(5))
    r.shuffle(l)
    return l, r.random(), r.choice("abc"), r.sample(range(9), 3), r.gauss(0, 1)


@library
def iterator_tools(n):
    return (
        [list(g) for k, g in itertools.groupby([1, 1, 2, n])],
        list(itertools.accumulate([1, 2, n], lambda a, b: a * b)),
        list(itertools.starmap(pow, [(2, n)])),
        list(itertools.takewhile(lambda v: v < n, [0, 1, 2, 9])),
        list(itertools.chain.from_iterable([[1], [n]])),
        list(itertools.zip_longest([1], [2, n])),
        list(itertools.product("ab", repeat=2))[:n],
        list(itertools.islice(itertools.cycle([1, 2]), n)),
        [a for a, b in itertools.pairwise([1, 2, n])],
        list(itertools.compress([1, 2], [0, 1])),
        itertools.tee([1, n])[1].__next__(),
    )


@functools.total_ordering
class TO:
    def __init__(s, v):
        s.v = v

    def __eq__(s, o):
        return s.v == o.v

    def __lt__(s, o):
        return s.v < o.v

    def __hash__(s):
        return hash(s.v)

    def __repr__(s):
        return f"TO{s.v}"


@library
def total_order(n):
    return (
        TO(1) >= TO(n),
        sorted([TO(3), TO(n), TO(1)]),
        max(TO(1), TO(n)),
        TO(n) in [TO(2)],
        {TO(1): 2}.get(TO(n)),
        {TO(n), TO(1)} == ({TO(1), TO(n)}),
        TO(1) != TO(n),
        [TO(1)] == [TO(n)],
    )


class Fl(enum.Flag):
    A = 1
    B = 2
    C = 4


class IE(enum.IntEnum):
    X = 1
    Y = 2


@library
def enumerations(n):
    return (
        str(Fl.A | Fl.B),
        Fl.B in (Fl.A | Fl.B),
        bool(Fl.A & Fl.B),
        IE(1) + n,
        [e.name for e in Fl],
        IE["Y"],
        Fl(3),
        IE.X < n,
    )


@library
def exit_stack(n):
    log = []
    with contextlib.ExitStack() as s:
        s.callback(log.append, n)
        s.enter_context(contextlib.suppress(ValueError))
        s.push(lambda *a: log.append("p"))
        log.append("in")
        if n > 1:
            raise ValueError
    return log


class NT(typing.NamedTuple):
    a: int
    b: str = "z"

    def f(s):
        return s.a * 2


@library
def named_tuples(n):
    return NT(n), NT(n).f(), NT(1, b="q")._asdict(), NT(n)[0], NT(n) == (n, "z"), [*NT(n)], NT._make([1, 2])


@library
def dates(n):
    d = datetime.datetime(2020, 1, n)
    return (
        d + datetime.timedelta(days=n),
        d.isoformat(),
        d.strftime("%Y-%m"),
        (datetime.date(2020, 2, 1) - datetime.date(2020, 1, n)).days,
    )


@library
def addresses(n):
    return (
        urllib.parse.urlparse(f"http://a.b/c?d={n}").query,
        urllib.parse.urlencode({"a": n}),
        urllib.parse.quote("a b"),
        urllib.parse.parse_qs("a=1&b=2"),
        urllib.parse.urljoin("http://a/b/", "../c"),
    )


@library
def parsers(n):
    return (
        shlex.split(f"a 'b c' {n}"),
        pprint.pformat({"a": [n] * 3, "b": {"c": (1, 2)}}),
        ast.literal_eval(f"[1,{n},{{'a':2}}]"),
        [tk.string for tk in tokenize.generate_tokens(io.StringIO(f"a+{n}").readline)],
    )


@library
def tables_of_text(n):
    b = io.StringIO()
    w = csv.writer(b)
    w.writerow([1, n, "a,b"])
    return (
        b.getvalue(),
        list(csv.reader(io.StringIO("a,b\nc,d"))),
        [dict(r) for r in csv.DictReader(io.StringIO("x,y\n1,2"))],
    )


@library
def configuration(n):
    c = configparser.ConfigParser()
    c.read_string(f"[a]\nk={n}\nz=%(k)s0")
    return c["a"]["z"], c.getint("a", "k"), c.sections()


@library
def assorted_modules(n):
    return (
        html.escape(f"<{n}>"),
        calendar.monthrange(2020, n),
        list(graphlib.TopologicalSorter({"a": {"b"}, "b": {"c"}}).static_order()),
        colorsys.rgb_to_hsv(0.1, 0.2, 0.3),
        fnmatch.filter(["a.py", "b.txt"], "*.py"),
        reprlib.repr(list(range(99))),
    )


@library
def queues_and_namespaces(n):
    q = queue.PriorityQueue()
    q.put((2, "b"))
    q.put((n, "a"))
    r = [q.get() for _ in range(2)]
    s = types.SimpleNamespace(a=n)
    s.b = [s.a]
    return r, s.b, repr(s), s == types.SimpleNamespace(a=n, b=[n])
