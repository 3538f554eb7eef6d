"""What programs change: globals, closures, containers, generators, exceptions and output, in order."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import sys
from collections import ChainMap, Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from capture_world import World, calls, normal, normals, programs_of, steps

COUNT = 0
HISTORY: list[Any] = []
SETTINGS = {"scale": 2.0}


def _globals_written() -> World:
    global COUNT
    COUNT = 0
    HISTORY.clear()

    def function(x: Any) -> Any:
        global COUNT
        COUNT += 1
        HISTORY.append(COUNT * 2)
        return x * COUNT + len(HISTORY)

    def reset() -> None:
        global COUNT
        COUNT = -5

    return steps(
        function, *(None, None, None, reset, None, HISTORY.clear, None), observe=lambda: (COUNT, [*HISTORY])
    )


def _global_set_anew() -> World:
    home: dict[str, Any] = {"torch": torch, "__name__": "own"}
    exec("def function(x):\n global fresh\n fresh = x.sum()\n return x * scale + len(str(type(other)))", home)

    def put(**values: Any) -> Callable[[], None]:
        return lambda: home.update(values)

    home.update(scale=2.0, other=1)
    return steps(
        home["function"],
        *(None, None, put(scale=3.0), put(other="a"), lambda: home.pop("fresh"), put(len=lambda v: 7), None),
        observe=lambda: sorted(key for key in home if not key.startswith("__")),
    )


def _closure_cells() -> World:
    total, scale, kept = 0.0, 1, None

    def function(x: Any) -> Any:
        nonlocal total, kept
        total += scale
        before, kept = kept, x
        return x * total, before is None, before if before is None else before + 1

    def change() -> None:
        nonlocal scale
        scale = 10

    def forget() -> None:
        nonlocal kept
        kept = None

    return steps(function, *(None, None, None, change, None, forget, None), observe=lambda: (total, scale))


def _closures_made() -> World:
    def function(x: Any) -> Any:
        def add(y: Any, by: Any = x.shape[0]) -> Any:
            nonlocal count
            count += 1
            return y + by

        count = 0
        makers = [lambda y, k=k: add(y) * k for k in range(3)]
        found = [make(x) for make in makers]
        return found, count, add.__closure__ is not None

    return calls(function, *[normals(n, 2) for n in (2, 2, 3, 4, 5, 2)])


def _generators() -> World:
    log: list[Any] = []

    def numbers(x: Any) -> Any:
        try:
            for n in range(4):
                sent = yield x * n
                log.append(None if sent is None else float(sent))
        finally:
            log.append("closed")

    def function(x: Any) -> Any:
        stream = numbers(x)
        first = next(stream)
        second = stream.send(2.0)
        rest = next(stream)
        stream.close()
        return first + second, rest, sum(numbers(x + 1)), list(itertools.islice(numbers(x), 2))

    return steps(function, *[None] * 4, observe=lambda: [*log])


def _generator_outside() -> World:
    stream = (n * 0.5 for n in itertools.count())
    iterator = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    return steps(lambda x: x * next(stream) + next(iterator), *[None] * 6)


def _delegated() -> World:
    def inner(x: Any) -> Any:
        got = yield x
        try:
            yield got + x
        except ValueError as error:
            yield x * len(str(error))
        return x.sum()

    def outer(x: Any) -> Any:
        total = yield from inner(x)
        yield total

    def function(x: Any) -> Any:
        stream = outer(x)
        return [
            next(stream),
            stream.send(x + 1),
            stream.throw(ValueError("four")),
            next(stream),
            next(stream, None),
        ]

    return steps(function, *[None] * 4)


def _exceptions_with_state() -> World:
    class Failed(Exception):
        def __init__(self, message: str, value: Any) -> None:
            super().__init__(message)
            self.value = value

    seen: list[Any] = []

    def check(x: Any, n: int) -> Any:
        if n % 3 == 0:
            raise Failed(f"bad {n}", x * n)
        return x + n

    def function(x: Any, n: int) -> Any:
        try:
            y = check(x, n)
        except Failed as error:
            seen.append(error.args)
            y = error.value + len(seen)
        else:
            y = y * 2
        finally:
            seen.append(n)
        return y

    return calls(
        function, *[lambda n=n: (normal(3), n) for n in (1, 3, 2, 0, 3, 4, 6)], observe=lambda: [*seen]
    )


def _exceptions_out() -> World:
    box: list[Any] = []

    def function(x: Any, n: int) -> Any:
        box.append(n)
        x.add_(1)
        if n > 2:
            try:
                box[10]
            except IndexError as error:
                raise KeyError(n) from error
        if n < 0:
            raise ValueError(x.shape, n)
        return x * n

    return calls(
        function, *[lambda n=n: (normal(3), n) for n in (1, 3, -1, 2, 5, -1, 1)], observe=lambda: [*box]
    )


def _nested_handlers() -> World:
    def function(x: Any, n: int) -> Any:
        log = []
        for k in range(n):
            try:
                try:
                    if k % 2:
                        raise ValueError(k)
                    if k > 3:
                        break
                    continue
                finally:
                    log.append(("in", k))
            except ValueError as error:
                log.append(error.args[0])
                x = x * 2
        else:
            log.append("else")
        return x, log, sys.exc_info()[0]

    return calls(function, *[lambda n=n: (normal(3), n) for n in (1, 2, 4, 6, 2, 8)])


def _exception_groups() -> World:
    def function(x: Any, n: int) -> Any:
        found = []
        try:
            raise ExceptionGroup("several", [ValueError(n), TypeError("t"), ValueError(2)])
        except* ValueError as group:
            found.append(len(group.exceptions))
        except* TypeError as group:
            found.append(str(group.exceptions[0]))
        return x * len(found), found

    return calls(function, *[lambda n=n: (normal(3), n) for n in (1, 2, 1, 3)])


def _suppressed() -> World:
    seen: list[Any] = []

    @contextlib.contextmanager
    def scaled(by: float) -> Any:
        seen.append(by)
        try:
            yield by * 2
        except ZeroDivisionError:
            seen.append("zero")
        finally:
            seen.append("out")

    def function(x: Any, n: int) -> Any:
        with scaled(n) as by, contextlib.suppress(KeyError):
            x = x + by
            x = x * (6 // n)
            {}[n]
        with contextlib.ExitStack() as stack:
            stack.callback(seen.append, "last")
            stack.enter_context(scaled(1))
            return x

    return calls(function, *[lambda n=n: (normal(3), n) for n in (1, 2, 0, 3, 1, 0)], observe=lambda: [*seen])


def _lists() -> World:
    kept: list[Any] = [1.0, 2.0, 3]

    def function(x: Any) -> Any:
        kept.append(len(kept))
        kept[0] += 1
        kept.insert(1, x.shape[0])
        last = kept.pop()
        if len(kept) > 6:
            del kept[2:4]
        kept.reverse()
        return x * last + sum(kept), kept[:2], kept.index(kept[-1])

    return steps(
        function,
        *(None, None, None, kept.clear, None, lambda: kept.extend([5, 6, 7]), None),
        observe=lambda: [*kept],
    )


def _dictionaries() -> World:
    kept: dict[Any, Any] = {"a": 1}

    def function(x: Any) -> Any:
        kept["b"] = kept.get("b", 0) + 1
        kept.setdefault("c", []).append(kept["b"])
        first = next(iter(kept))
        kept[first] = kept.pop(first)
        both = kept | {"z": 1}
        return x * kept["b"], list(both), dict(reversed(list(kept.items()))), "a" in kept

    return steps(
        function,
        *(None, None, None, lambda: kept.pop("a"), None, lambda: kept.update({1: 2, "a": 5}), None),
        observe=lambda: list(kept.items()),
    )


def _sets() -> World:
    kept = {1, 2}

    def function(x: Any) -> Any:
        kept.add(len(kept) * 2)
        kept.discard(4)
        return x * len(kept), sorted(kept & {1, 2, 6}), kept >= {1}, frozenset(kept) ^ {1}

    return steps(
        function, *(None, None, None, lambda: kept.add(99), None, kept.clear, None), observe=lambda: set(kept)
    )


def _queues() -> World:
    queue: deque[Any] = deque([1, 2, 3], maxlen=4)
    heap: list[Any] = [5, 1, 9]
    heapq.heapify(heap)

    def function(x: Any) -> Any:
        queue.append(queue[0] + 1)
        queue.rotate(1)
        heapq.heappush(heap, len(queue) + heap[0])
        return x * heapq.heappop(heap) + queue.popleft(), list(queue)

    return steps(
        function,
        *(None, None, None, lambda: queue.extend([7, 8]), None),
        observe=lambda: (list(queue), list(heap)),
    )


def _counters() -> World:
    words, chain = Counter("abca"), ChainMap({"a": 1}, {"b": 2})

    def function(x: Any) -> Any:
        words.update("ab")
        chain["c"] = words["a"]
        return x * chain["b"] + chain["c"], words.most_common(1), list(chain)

    return steps(
        function,
        *(None, None, None, lambda: words.subtract("aaa"), lambda: chain.maps[1].update(b=9), None),
        observe=lambda: (dict(words), dict(chain)),
    )


def _kept_tensors() -> World:
    cache: dict[str, Any] = {}

    def function(x: Any) -> Any:
        if "k" in cache:
            cache["k"] = torch.cat([cache["k"], x], 0)
        else:
            cache["k"] = x
        return cache["k"].sum(0) + x.mean(0), cache["k"] is x

    return steps(function, *(None,) * 5, cache.clear, None, observe=lambda: dict(cache))


def _ring_buffer() -> World:
    buffer, at = torch.zeros(4, 4), [0]

    def function(x: Any) -> Any:
        buffer[at[0]] = x[0]
        at[0] = (at[0] + 1) % 4
        return buffer.roll(-at[0], 0) * 2, buffer[at[0] - 1]

    return steps(function, *[None] * 7, observe=lambda: (buffer.clone(), at[0]))


def _in_place_on_views() -> World:
    base = torch.zeros(4, 4)

    def function(x: Any) -> Any:
        row, column = base[1], base[:, 2]
        row.add_(x[0])
        column.mul_(2).sub_(1)
        base.t()[0].copy_(x[1])
        diagonal = base.diagonal()
        diagonal[:2] += 5
        return row, column + 1, base.view(-1)[3:7], diagonal

    return steps(function, *[None] * 5, observe=lambda: base.clone())


def _argument_containers() -> World:
    def function(x: Any, items: Any, table: Any) -> Any:
        items.append(x + len(items))
        table["last"] = items[-1]
        table.setdefault("all", []).extend(items)
        return items, table["all"][0], table

    shared: list[Any] = []

    def make(same: bool) -> Any:
        return lambda: (normal(2), shared if same else [], {"all": shared} if same else {})

    return calls(function, *map(make, (False, False, True, True, False, True)), observe=lambda: len(shared))


def _same_container_twice() -> World:
    def function(a: Any, b: Any) -> Any:
        a.append(torch.ones(2))
        b.append(len(a))
        return a, b, a is b, len(b)

    def pair(same: bool) -> Any:
        one: list[Any] = [torch.zeros(1)]
        return one, one if same else list(one)

    return calls(function, *[lambda s=s: pair(s) for s in (False, False, True, False, True, True)])


programs_of(globals(), "effect")
