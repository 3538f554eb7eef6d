"""What programs print, log, unpack and delete, in order."""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import itertools
import logging
import types
import warnings
from typing import Any

import numpy as np
import torch
from capture_world import World, calls, normal, programs_of, steps


def _printed() -> World:
    def function(x: Any, n: int) -> Any:
        print("n", n, x.shape, f"{n:>4}|{x.dtype}", sep=";")
        if n > 1:
            print(x.sum().item() > 0, end="!\n")
        return x * n

    return calls(function, *[lambda n=n: (normal(3), n) for n in (1, 2, 3, 1, 2, 5)])


def _formatted_tensors() -> World:
    def function(x: Any) -> Any:
        text = f"{x} {x.shape} {x.sum():.2f} {x.numel()}"
        return x + len(text), text, str(x * 2), repr(x[0])

    return calls(function, *[lambda s=s: (normal(2, 3, seed=s),) for s in (0, 1, 0, 2, 3)])


class Worded(Exception):
    """An error whose text is its own."""

    def __str__(self) -> str:
        return "worded"


class Shaped(KeyError):
    """An error that formats and shows itself."""

    def __format__(self, spec: str) -> str:
        return f"shaped{spec}"

    def __repr__(self) -> str:
        return "Shaped!"


ERRORS = (ValueError("v", 2), OSError(2, "gone", "f"), Worded(1), Shaped("k"), KeyError("é"), ValueError())


def caught(x: Any, n: int) -> Any:
    """Return texts of errors, and print one."""
    y, texts = torch.relu(x), []
    try:
        if n < len(ERRORS):
            raise type(ERRORS[n])(*ERRORS[n].args)
        {}[x.shape[0]]
    except Exception as error:
        texts += [f"{error}", f"{error!r}", f"{error!s:>12}", repr(error), str(error)]
        print("caught", error)
    return y * 2, texts


def _caught() -> World:
    return calls(caught, *[lambda n=n: (normal(3), n) for n in (*range(7), *range(7))])


def _warned() -> World:
    seen: list[str] = []

    def function(x: Any, n: int) -> Any:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warnings.warn(f"n is {n}", stacklevel=2)
        seen.extend(str(item.message) for item in found)
        return x * len(found)

    return calls(function, *[lambda n=n: (normal(3), n) for n in (1, 2, 3, 1)], observe=lambda: [*seen])


def _logged() -> World:
    stream = io.StringIO()
    logger = logging.Logger("own", logging.INFO)
    logger.addHandler(logging.StreamHandler(stream))

    def function(x: Any, n: int) -> Any:
        logger.info("n %d of %s", n, tuple(x.shape))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("more")
            return x * 2
        return x + n

    world = calls(function, *[lambda n=n: (normal(3), n) for n in (1, 2, 3, 1, 2)], observe=stream.getvalue)
    world.steps[3] = (lambda: logger.setLevel(logging.DEBUG), world.steps[3][1])
    return world


def _arrays() -> World:
    table = np.arange(6.0).reshape(2, 3)

    def function(x: Any) -> Any:
        table[0] += 1
        scale = float(table.sum()) / table.size
        return x * scale + torch.from_numpy(table).float()[0, 0], table.shape, x.numpy().sum() > 0

    return steps(function, *(None, None, None, lambda: table.fill(0), None), observe=table.copy)


def _attributes_of_objects() -> World:
    held = types.SimpleNamespace(n=0, items=[], last=None)

    def function(x: Any) -> Any:
        held.n += 1
        held.items.append(held.n)
        held.last, before = x, held.last
        if held.n == 3:
            held.flag = True
        return x * held.n, before is x, getattr(held, "flag", False), vars(held)["n"]

    return steps(
        function,
        *(None,) * 4,
        lambda: delattr(held, "flag"),
        lambda: setattr(held, "n", 0),
        None,
        observe=lambda: {key: value for key, value in vars(held).items() if key != "last"},
    )


def _identities() -> World:
    kept = torch.ones(2)

    def function(x: Any, y: Any) -> Any:
        same = x is y
        z = x if same else x + 0
        return z is x, x.view_as(x) is x, [x, y, kept], (kept, kept), {"x": x}["x"] is x, x.contiguous()

    def pair(kind: int) -> Any:
        one = normal(2)
        return (
            (one, one)
            if kind == 1
            else (one, kept)
            if kind == 2
            else (kept, kept)
            if kind == 3
            else (one, one + 0)
        )

    return calls(function, *[lambda k=k: pair(k) for k in (0, 0, 1, 2, 3, 0, 3, 1, 2)])


def _unpacking() -> World:
    def function(x: Any, *args: Any, scale: Any = 1, **rest: Any) -> Any:
        first, *middle, last = (*args, 4)
        (a, b), c = (first, last), [*middle, *rest.values()]
        rest["new"] = a
        return x * scale + b, c, rest, {**rest, "x": x}

    world = calls(
        lambda x, given, named: function(x, *given, **named),
        *[
            lambda g=g, n=n: (normal(2), g, n)
            for g, n in (
                ((1,), {}),
                ((1, 2), {"scale": 3}),
                ((2, 5, 6), {"k": 1}),
                ((1,), {}),
                ((7,), {"scale": 2}),
            )
        ],
    )
    return world


def _comprehensions() -> World:
    def function(xs: Any, n: int) -> Any:
        table = {k: [x * k for x in xs if x.dim()] for k in range(n)}
        flat = [v for row in table.values() for v in row]
        total = sum((v.sum() for v in flat), start=torch.zeros(()))
        return (
            table,
            total,
            {len(row) for row in table.values()},
            [*map(len, table.values())],
            max((v.shape for v in flat), default=0),
        )

    return calls(
        function,
        *[lambda n=n, m=m: ([normal(2)] * m, n) for n, m in ((2, 1), (3, 2), (2, 1), (0, 3), (4, 1))],
    )


def _recursion() -> World:
    def folded(tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return tree * 2
        if isinstance(tree, dict):
            return {key: folded(value) for key, value in tree.items()}
        return type(tree)(folded(item) for item in tree)

    one, other = normal(2), normal(3)
    trees = ([one, (other,)], {"a": one, "b": [other]}, [one, (other,)], (one, {"c": (one,)}), [[[[one]]]])
    return calls(folded, *[lambda t=t: (t,) for t in trees])


def _iterators_consumed() -> World:
    def function(x: Any, items: Any) -> Any:
        total = x
        for at, item in enumerate(items):
            total = total + item * at
            if at == 1:
                break
        return total, list(items) if not isinstance(items, list) else len(items)

    makers = (
        lambda: iter([1, 2, 3, 4]),
        lambda: [1, 2, 3],
        lambda: (n for n in range(5)),
        lambda: map(abs, [-1, -2, -3]),
    )
    return calls(function, *[lambda m=m: (normal(2), m()) for m in (*makers, *makers)])


def _zipped() -> World:
    def function(x: Any, names: Any) -> Any:
        pairs = dict(zip(names, itertools.accumulate(range(1, 5))))
        grouped = {k: len(list(g)) for k, g in itertools.groupby(sorted(names))}
        return (
            x * sum(pairs.values()),
            grouped,
            collections.OrderedDict(pairs),
            list(itertools.product(names, repeat=2))[:2],
        )

    return calls(function, *[lambda n=n: (normal(2), n) for n in ("ab", "abc", "ab", "xxyz", "a")])


def _assertions() -> World:
    def function(x: Any, n: Any) -> Any:
        assert n != 3, f"n is {n}"
        assert x.shape[0] == 2
        return x * n

    return calls(
        function,
        *[lambda n=n, s=s: (normal(s), n) for n, s in ((1, 2), (3, 2), (2, 2), (1, 3), (4, 2), (3, 2))],
    )


def _deleted() -> World:
    held = {"a": 1, "b": 2}

    def function(x: Any) -> Any:
        y = x * 2
        held.pop("b", None)
        try:
            del held["c"]
        except KeyError as error:
            y = y + len(str(error))
        del x
        held["c"] = 1
        return y

    return steps(function, *(None, None, None, lambda: held.pop("c"), None), observe=lambda: dict(held))


def check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _messages_that_nobody_reads() -> World:
    def function(x: Any, n: int) -> Any:
        count = (x > 0).sum()
        text = f"{count} of {n}, {x.shape[0]} rows, {x.mean():.3f} on average"
        x = x + 1
        check(n < 3, text)
        return x * n

    return calls(function, *[lambda n=n: (normal(n + 1, 3, seed=n), n) for n in (1, 1, 2, 0, 2, 1, 4, 1, 3)])


def _messages_that_are_used() -> World:
    def function(x: Any, n: int) -> Any:
        total = x.sum()
        text = f"<{total:.2f}>"
        total.add_(1)
        longer = f"{text} and then {total}"
        print(text, f"{longer:>30}")
        kept = [longer, {"text": text}]
        return (text, longer), kept, len(text), text == "<0.00>", x * total

    return calls(function, *[lambda n=n: (normal(3, seed=n), n) for n in (1, 1, 2, 3, 2)])


class Slotted:
    __slots__ = ("__own", "text")

    def hold(self, text: Any) -> Any:
        self.text = self.__own = text
        return self.text, self.__own


def _messages_that_are_kept() -> World:
    shared = types.SimpleNamespace(text="")

    def function(x: Any) -> Any:
        text = f"{x.sum():.1f}"
        inner = lambda: text  # noqa: E731
        pair = text, x.shape[0]
        shared.text, queue = pair, collections.deque([text], 2)
        queue.append(text)
        queue[0] = pair
        table = collections.OrderedDict(pair=pair)
        table["text"] = text
        return x * 2, inner(), shared.text, inner, Slotted().hold(text), queue, table["text"], table["pair"]

    def kept() -> Any:
        return shared.text, type(shared.text[:1][0] if shared.text else "")

    def called(x: Any) -> Any:
        *values, inner, slots, queue, text, pair = function(x)
        return [*values, inner(), type(inner()), slots, list(queue), type(queue[1]), text, pair]

    return calls(called, *[lambda s=s: (normal(3, seed=s),) for s in (0, 0, 1, 2, 1)], observe=kept)


def _methods_of_messages() -> World:
    def function(x: Any) -> Any:
        text = f"{x.sum():.1f}"
        found = text.encode(), text.split("."), text.startswith("1"), text.__len__(), text.upper()
        same = text.__class__ is str is type(text), copy.copy(text), copy.deepcopy([text])
        with contextlib.suppress(AttributeError):
            text.no_such_method()
        return x * 2, found, same, text.join("ab"), "-".join([text, text])

    return calls(function, *[lambda n=n: (torch.full((3,), float(n)),) for n in (1, 1, 4, 1, 5)])


def _messages_with_whole_tensors() -> World:
    def function(x: Any) -> Any:
        y = x * 1
        check(x.shape[0] > 1, f"{x} {x[:1]!r} {y}")
        text = f"{y!s}"
        y.add_(1)
        return y, text

    return calls(function, *[lambda n=n: (normal(n, 2, seed=n),) for n in (2, 2, 3, 1, 2, 4)])


programs_of(globals(), "effect")
