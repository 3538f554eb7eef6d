"""Generators, coroutines and iterators that live longer than a call; errors that are swallowed midway."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import types
from collections import deque
from typing import Any

import torch
from capture_world import World, calls, normal, normals, programs_of, steps


def _generator_between_calls() -> World:
    def numbers(y: Any) -> Any:
        while True:
            y = y * 2
            yield y

    held = [numbers(torch.ones(4))]
    return steps(
        lambda x: x + next(held[0]),
        *(None, None, None, lambda: held.__setitem__(0, numbers(torch.zeros(4))), None, None),
        observe=lambda: next(held[0]).clone(),
    )


def _generator_sent_to() -> World:
    def total() -> Any:
        known, count = 0.0, 0
        while True:
            count += 1
            known = known + (yield known, count)

    def fresh() -> None:
        held[:] = [total()]
        next(held[0])

    held: list[Any] = []
    fresh()
    return steps(lambda x: held[0].send(x), *(None, None, None, fresh, None, None))


def _generator_kept_from_inside() -> World:
    kept: deque[Any] = deque(maxlen=2)

    def function(x: Any) -> Any:
        made = (row * (i + 1) for i, row in enumerate(x))
        first = next(made)
        before = [next(old, None) for old in kept]
        kept.append(made)
        return first, before

    return steps(function, *[None] * 6)


def _generator_closed() -> World:
    log: list[Any] = []

    def guarded(x: Any) -> Any:
        try:
            yield x + 1
            yield x + 2
        except GeneratorExit:
            log.append("exit")
            raise
        except ValueError as error:
            yield x * len(str(error))
        finally:
            log.append("end")

    def function(x: Any, how: int) -> Any:
        made = guarded(x)
        y = next(made)
        if how == 0:
            made.close()
        elif how == 1:
            y = y + made.throw(ValueError("four"))
        elif how == 2:
            y = y + sum(made)
        else:
            del made
        log.append(how)
        return y

    return calls(function, *[lambda n=n: (normal(3), n) for n in (0, 1, 2, 3, 1, 0, 3)], observe=log.copy)


def _generator_left_early() -> World:
    log: list[Any] = []

    def rows(x: Any, name: str) -> Any:
        try:
            for row in x:
                yield row
        finally:
            log.append(name)

    def first(x: Any) -> Any:
        made = rows(x, "first")
        return next(made)

    def function(x: Any, n: int) -> Any:
        y = x.sum(0)
        for i, row in enumerate(rows(x, "loop")):
            y = y + row
            if i == n:
                break
        log.append("after the loop")
        y = y + first(x)
        log.append("after the call")
        made = rows(x, "one")
        y = y + next(made)
        made = rows(x, "two")
        log.append("after another")
        pairs = [a * b for a, b in zip(rows(x, "zip"), range(2))]
        log.append("after pairs")
        del made
        log.append("end")
        return y + sum(pairs) + len(log)

    return calls(function, *[lambda n=n: (normal(3, 2), n) for n in (0, 0, 1, 5, 1, 0)], observe=log.copy)


def _generator_value() -> World:
    def inner(x: Any) -> Any:
        yield x.sum()
        return x.shape[0]

    def outer(x: Any) -> Any:
        count = yield from inner(x)
        yield x * count

    return calls(lambda x: [*outer(x)], *[normals(n, 2) for n in (3, 3, 4, 2, 1)])


def _coroutine_driven() -> World:
    class Step:
        def __await__(self) -> Any:
            return (yield "step")

    async def inner(x: Any) -> Any:
        got = await Step()
        return x * got

    async def outer(x: Any) -> Any:
        return await inner(x) + await inner(x + 1)

    def function(x: Any, n: int) -> Any:
        running = outer(x)
        asked = [running.send(None)]
        try:
            while True:
                asked.append(running.send(n))
        except StopIteration as end:
            return end.value, asked

    return calls(function, *[lambda n=n: (normal(3), n) for n in (2, 2, 3, 4, 2)])


def _event_loop() -> World:
    order: list[Any] = []

    async def work(x: Any, name: str) -> Any:
        order.append(name)
        await asyncio.sleep(0)
        order.append(name.upper())
        return torch.relu(x)

    async def all_of(x: Any) -> Any:
        first, second = await asyncio.gather(work(x, "a"), work(-x, "b"))
        return first - second

    def function(x: Any) -> Any:
        return asyncio.run(all_of(x)) + len(order)

    return steps(function, *[None] * 4, observe=order.copy)


def _asynchronous_iteration() -> World:
    async def rows(x: Any) -> Any:
        for row in x:
            yield row * 2

    class Scope:
        async def __aenter__(self) -> Any:
            return 3.0

        async def __aexit__(self, *error: Any) -> bool:
            return True

    async def gather(x: Any, fails: bool) -> Any:
        found = [row async for row in rows(x) if row[0] < 5]
        async with Scope() as scale:
            found.append(x[0] * scale)
            if fails:
                raise ValueError("lost")
            found.append(x[1])
        return torch.stack(found)

    def function(x: Any, fails: bool) -> Any:
        try:
            gather(x, fails).send(None)
        except StopIteration as end:
            return end.value

    return calls(function, *[lambda f=f: (normal(3, 2), f) for f in (False, True, False, True, True)])


def _iterators_between_calls() -> World:
    items = [1.0, 2.0, 3.0]
    walk, count, circle = iter(items), itertools.count(5), itertools.cycle("abc")
    both = zip(itertools.count(), itertools.repeat(2.0))

    def function(x: Any) -> Any:
        return x * next(walk, -1.0) + next(count), next(circle), next(both)

    return steps(function, None, None, lambda: items.append(7.0), *[None] * 4)


def _split_iterators() -> World:
    first, second = itertools.tee(iter([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]))
    groups = itertools.groupby([1, 1, 2, 2, 2, 3, 3, 1, 1])

    def function(x: Any) -> Any:
        key, members = next(groups, (0, ()))
        return x * next(first) + sum(itertools.islice(second, 2)) * 0.5, key, [*members]

    return steps(function, *[None] * 4)


def _dictionary_changed_in_a_loop() -> World:
    table = {"a": 1.0, "b": 2.0}

    def function(x: Any, add: int) -> Any:
        for key in table:
            x = x * table[key]
            if add:
                table[key * (add + 1)] = float(add)
        return x

    return calls(
        function, *[lambda n=n: (normal(3), n) for n in (0, 1, 0, 0, 2, 0)], observe=lambda: dict(table)
    )


def _list_changed_in_a_loop() -> World:
    items = [1.0, 2.0, 3.0, 4.0]

    def function(x: Any) -> Any:
        for item in items:
            x = x + item
            if item in (2.0, 5.0):
                items.remove(item)
            if item == 4.0 and len(items) < 6:
                items.append(x.dim() + 4.0)
        return x

    return steps(
        function, *(None, None, lambda: items.insert(0, 2.0), None, items.clear, None), observe=items.copy
    )


def _swallowed_midway() -> World:
    log: list[Any] = []

    def function(x: Any, bad: int) -> Any:
        y = x.clone()
        try:
            y.add_(1)
            log.append("one")
            y[bad] = 5.0
            log.append("two")
            y.view(7)
            log.append("never")
        except IndexError:
            y.mul_(2)
        except RuntimeError as error:
            log.append(type(error).__name__)
            y = y - 1
        finally:
            x.sub_(0.5)
        return y

    return calls(function, *[lambda n=n: (normal(4), n) for n in (0, 9, 0, 9, 3, -4, -5)], observe=log.copy)


def _suppressed_in_a_loop() -> World:
    class Quiet:
        def __init__(self) -> None:
            self.errors: list[str] = []

        def __enter__(self) -> Quiet:
            return self

        def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
            self.errors.append(str(error)) if error else None
            return 1 if kind is KeyError else 0

    quiet = Quiet()

    def function(x: Any, table: Any) -> Any:
        for key in "abc":
            with quiet, contextlib.suppress(ZeroDivisionError):
                x = x * (6 / table[key])
        return x

    tables = (
        {"a": 1, "b": 2, "c": 3},
        {"a": 0, "b": 2},
        {"c": 4},
        {"a": 1, "b": 0, "c": "no"},
        {"a": 1, "b": 2, "c": 3},
    )
    return calls(function, *[lambda t=t: (normal(3), t) for t in tables], observe=quiet.errors.copy)


def _finally_returns() -> World:
    log: list[Any] = []

    def early(x: Any, n: int) -> Any:
        for i in range(3):
            try:
                if i == n:
                    return x * 10
                if n > 5:
                    raise ValueError(n)
                x = x + i
            finally:
                log.append(i)
                if n == 1:
                    continue
                if n == 7:
                    break
                if n == 8:
                    return x - 100
        return x

    return calls(early, *[lambda n=n: (normal(3), n) for n in (0, 1, 2, 3, 8, 7, 0)], observe=log.copy)


def _groups_of_errors() -> World:
    def function(x: Any, n: int) -> Any:
        seen = []
        try:
            if n:
                parts = [ValueError("v"), TypeError(str(x.shape)), KeyError("k")][:n]
                raise ExceptionGroup("all", parts)
            x = x * 2
        except* ValueError as group:
            seen.append(len(group.exceptions))
            x = x + 1
        except* TypeError as group:
            seen.append(str(group.exceptions[0]))
            x = x - 3
        return x, seen

    return calls(function, *[lambda n=n: (normal(3), n) for n in (0, 1, 2, 0, 3, 2, 1)])


def _errors_with_tensors() -> World:
    class Found(Exception):
        pass

    def inner(x: Any, n: int) -> Any:
        try:
            if n > 2:
                raise Found(x * n, n)
            return x / n
        except Found as error:
            error.add_note(f"n {n}")
            raise
        except ZeroDivisionError as error:
            raise KeyError("zero") from error

    def function(x: Any, n: int) -> Any:
        try:
            return inner(x, n), None
        except (Found, KeyError) as error:
            return error.args[0], getattr(error, "__notes__", [str(error.__cause__)])

    return calls(function, *[lambda n=n: (normal(3), n) for n in (1, 3, 4, 2, 5, 3)])


def _variables_of_a_context() -> World:
    scale: contextvars.ContextVar[Any] = contextvars.ContextVar("scale", default=2.0)

    def inner(x: Any) -> Any:
        scale.set(scale.get() + 1)
        return x * scale.get()

    def function(x: Any) -> Any:
        token = scale.set(scale.get() * 2)
        y = x * scale.get() + contextvars.copy_context().run(inner, x)
        scale.reset(token)
        return y + scale.get()

    return steps(function, *(None, None, lambda: scale.set(5.0), None, None), observe=scale.get)


def _deleted_names() -> World:
    def function(x: Any, n: int) -> Any:
        y = x + 1
        if n == 1:
            del y

        def read() -> Any:
            return y

        try:
            return read() * 2
        except NameError as error:
            return str(error)
        finally:
            if n == 2:
                y = None

    return calls(function, *[lambda n=n: (normal(3), n) for n in (0, 1, 0, 2, 1, 0)])


def _three_levels_of_closures() -> World:
    a, b = 1.0, torch.ones(3)

    def outer(x: Any) -> Any:
        c = x * 2

        def middle() -> Any:
            nonlocal a, c

            def inner() -> Any:
                nonlocal a, b, c
                a, c = a + 1, c + a
                b = b * 2
                return c

            return inner

        made = middle()
        made(), made()
        kept.append(made)
        return c, a, b, kept[0]()

    kept: list[Any] = []
    return steps(outer, *[None] * 5, observe=lambda: (a, b.clone()))


def _default_arguments_changed() -> World:
    def function(x: Any, seen: Any = [], *, table: Any = {"n": 0}) -> Any:
        seen.append(len(seen))
        table["n"] += seen[-1]
        table[len(seen)] = x
        return x * table["n"], seen, len(table)

    return steps(
        function,
        *(None, None, None, lambda: function.__defaults__[0].clear()),
        *(None, lambda: function.__kwdefaults__.update(table={"n": 7}), None),
    )


def _kept_partials() -> World:
    def add(x: Any, *more: Any, scale: float = 1.0) -> Any:
        return x * scale + sum(more)

    held = [functools.partial(add, scale=2.0)]

    def function(x: Any) -> Any:
        held.append(functools.partial(held[-1], x.mean(), scale=len(held)))
        return held[-1](x) if len(held) < 6 else held[-1].func(x), held[-1].keywords, len(held[-1].args)

    return steps(function, *[None] * 7)


def _matched() -> World:
    def function(value: Any) -> Any:
        match value:
            case torch.Tensor(ndim=1, shape=(n,)) if n > 3:
                return value * n
            case torch.Tensor() as x:
                return x.sum()
            case {"x": torch.Tensor() as x, **rest}:
                return x * len(rest), [*rest]
            case [torch.Tensor() as first, *others] if others:
                return first + sum(others), len(others)
            case [only]:
                return only
            case types.SimpleNamespace(x=x, scale=1 | 2 | 3 as scale):
                return x * scale
            case None | "nothing":
                return None
            case _:
                return type(value).__name__

    x, space = normals(3), types.SimpleNamespace
    values = (
        lambda: normal(5),
        x,
        lambda: {"x": x()[0], "a": 1},
        lambda: [x()[0]],
        lambda: [*x(), *x()],
        lambda: None,
    )
    values += (
        lambda: space(x=x()[0], scale=2),
        lambda: space(x=x()[0], scale=4),
        lambda: (normal(5), 2.0),
        lambda: "nothing",
    )
    return calls(function, *[lambda v=v: (v() if v is not x else v()[0],) for v in values])


programs_of(globals(), "suspended")
