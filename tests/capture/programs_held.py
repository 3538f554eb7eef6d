"""Generators that containers, objects and managers hold, and what happens when these die."""

from __future__ import annotations

import collections
import contextlib
import functools

import torch
from capture_world import calls, normal, program

SIZES = [lambda size=size: (normal(size, 4),) for size in (3, 3, 5, 6)]


def numbers(log, first):
    try:
        while True:
            log.append((yield first))
            first += 1
    finally:
        log.append(("closed", first))


@contextlib.contextmanager
def scope(log, number):
    log.append(number)
    try:
        yield number
    finally:
        log.append(-number)


class Holder:
    """Something with attributes."""


class Loader:
    """An iterator that keeps the generator that it takes from."""

    def __init__(self, rows):
        self.rows = rows

    def batches(self):
        for row in self.rows:
            yield row * 2

    def __iter__(self):
        self.iterator = self.batches()
        return self

    def __next__(self):
        return next(self.iterator) + 1


@program
def held_by_loaders():
    def fn(x):
        total, holder = torch.zeros(4), Holder()
        for row in Loader(x):
            total = total + row
        holder.rows = (row for row in x)
        first = functools.partial(next, holder.rows)
        return total, first(), next(holder.rows), [next(rows) for rows in [iter(x), (row for row in x)]]

    return calls(fn, *SIZES)


@program
def held_in_turns():
    def fn(x):
        turns, taken = collections.deque([iter([1, 2]), (number for number in (7, 8)), iter("ab")]), []
        pair = {"a": ((number for number in (2, 3)), 1)}
        while turns:
            taking = turns.popleft()
            with contextlib.suppress(StopIteration):
                taken.append(next(taking))
                turns.append(taking)
        return x * next(pair["a"][0]), taken

    return calls(fn, *SIZES)


@program
def held_by_stacks():
    @contextlib.contextmanager
    def doubled(number):
        yield number * 2

    def fn(x):
        with contextlib.ExitStack() as stack:
            scales = [stack.enter_context(doubled(number)) for number in (1, 2)]
            kept = stack.pop_all()
        kept.close()
        return x * sum(scales)

    return calls(fn, *SIZES)


@program
def held_managers_that_nobody_leaves():
    def enter(log):
        manager = scope(log, 2)
        manager.__enter__()
        log.append("entered")

    def fn(x):
        log = []
        last, manager = scope(log, 3), scope(log, 1)
        manager.__enter__()
        last.__enter__()
        del manager
        log.append("deleted")
        enter(log)
        log.append("left")
        return x * 2, log

    return calls(fn, *SIZES)


@program
def held_until_the_holder_dies():
    def in_list(log):
        held = [numbers(log, 1)]
        log.append(next(held[0]))

    def in_attribute(log):
        holder = Holder()
        holder.numbers = numbers(log, 5)
        log.append(next(holder.numbers))

    def in_stack(log):
        log.append(contextlib.ExitStack().enter_context(scope(log, 9)))

    def fn(x):
        log = []
        for hold in (in_list, in_attribute, in_stack):
            hold(log)
            log.append("dead")
        return x * log[0], log

    return calls(fn, *SIZES)


@program
def held_across_a_branch():
    def fn(x):
        log, inside = [], [numbers([], 2), (number for number in (4, 5))]
        scale = next(inside[0]) + next(inside[1])
        y = x * scale if x.sum() > 0 else x - scale
        inside[0].send("sent")
        return y, next(inside[1]), log

    return calls(fn, *SIZES)
