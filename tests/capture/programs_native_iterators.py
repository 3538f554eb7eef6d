"""Programs that see what iterators of natives are and when they act, and natives that refuse arguments."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator

import torch
from capture_world import calls, normals, programs_of


class Noting:
    def __init__(self, log, items):
        self.log, self.items = log, items

    def __iter__(self):
        self.log.append("iter")
        return iter(self.items)


def what(raised):
    return type(raised).__name__, str(raised)


def all_of(iterator, most=8):
    """Take items, errors of which end nothing."""
    found = []
    for _ in range(most):
        try:
            found.append(next(iterator))
        except Exception as error:
            found.append(what(error))
    return found


def over(function):
    return calls(function, *[normals(3)] * 3, normals(4))


def _go_on_after_errors():
    def odd(item):
        if item % 2:
            raise ValueError(item)
        return item > 2

    def added(total, item):
        if item == 2:
            raise ValueError(item)
        return total + item

    def fn(x):
        made = (
            map(lambda item: x * odd(item), range(4)),
            filter(odd, range(5)),
            itertools.filterfalse(odd, [0, 1, 4, 2]),
        )
        found = [all_of(each) for each in made]
        found += [all_of(each(odd, [1, 0, 3, 4, 0])) for each in (itertools.takewhile, itertools.dropwhile)]
        found.append(all_of(itertools.starmap(lambda a, b: x * a + b, [(1, 2), 5, [3, 4], (1,)])))
        found.append(all_of(itertools.accumulate([1, 2, 3, 4], added, initial=5)))
        return found

    return over(fn)


def _begin_at_once():
    def fn(x):
        log = []
        add = operator.add
        for make in (
            *(lambda it: map(abs, it), lambda it: map(add, it, it), lambda it: filter(None, it)),
            *(lambda it: itertools.starmap(add, it), lambda it: itertools.takewhile(bool, it)),
            *(lambda it: itertools.dropwhile(bool, it), lambda it: itertools.filterfalse(bool, it)),
            *(
                lambda it: itertools.compress(it, it),
                itertools.pairwise,
                lambda it: itertools.accumulate(it, add),
            ),
            *(itertools.chain, itertools.chain.from_iterable, lambda it: itertools.islice(it, 2)),
            *(
                itertools.cycle,
                lambda it: itertools.zip_longest(it, it),
                lambda it: functools.reduce(add, it),
            ),
        ):
            try:
                made = make(Noting(log, [[1, 2], [3, 4]]))
                log.append(type(made).__name__)
                next(made)
            except Exception as error:
                log.append(what(error))
            try:
                made = make(5)
                log.append(next(made))
            except Exception as error:
                log.append(what(error))
        return log, x + 1

    return over(fn)


def _end_by_their_function():
    def fn(x):
        def first(item):
            if item == 2:
                raise StopIteration
            return x * item

        return list(map(first, range(5))), [item for item in itertools.starmap(first, [(1,), (2,), (3,)])]

    return over(fn)


def _close_what_they_take():
    def fn(x):
        log = []

        def counted(name):
            try:
                yield from range(3)
            finally:
                log.append(name)

        for item in map(lambda item: x * item, counted("left")):
            if item.numel():
                break
        log.append("after")
        dropped = itertools.islice(counted("dropped"), 2)
        log.append(next(dropped))
        del dropped
        stopped = itertools.takewhile(lambda item: item < 1, counted("stopped"))
        log += all_of(stopped, 3)
        log.append("end")
        return log, item, isinstance(stopped, itertools.takewhile)

    return over(fn)


def _follow_their_items():
    def fn(x):
        steps = (x * k for k in range(4))
        pairs = [b - a for a, b in itertools.pairwise(steps)]
        rounds = itertools.cycle(x + k for k in range(2))
        chained = itertools.chain((x * k for k in range(2)), map(torch.relu, [x, -x]))
        sums = list(itertools.accumulate([x, x, x])), list(itertools.accumulate(chained, torch.add))
        chosen = [*itertools.compress([x, -x, 2 * x], [x.shape[0], [], (1,)])]
        return pairs, list(itertools.islice(rounds, 3)), sums, chosen

    return over(fn)


def _ask_what_generators_do():
    def fn(x):
        def outer():
            yield x
            yield from inner()

        def inner():
            yield x + 1

        made = outer()
        seen = [made.gi_yieldfrom, inspect.getgeneratorstate(made)]
        return [*seen, next(made), next(made), made.gi_yieldfrom.gi_code.co_name, list(made)]

    return over(fn)


def _refuse_arguments():
    def fn(x):
        log = []
        owner = {1: x}
        for call in (
            *(
                lambda: len(),
                lambda: len(obj=[]),
                lambda: isinstance(1),
                lambda: getattr(x),
                lambda: bool(1, 2),
            ),
            *(lambda: getattr(x, "shape", 1, 2), lambda: vars(1), lambda: globals(1), lambda: callable()),
            *(lambda: owner.__contains__(), lambda: owner.__getitem__(), lambda: owner.get(1, 2, 3)),
            *(lambda: {1}.add(), lambda: map(abs), lambda: filter(abs), lambda: functools.reduce(abs)),
            *(lambda: list(itertools.accumulate([1], step=2)), lambda: itertools.islice(iter([1]), "a")),
            *(lambda: operator.itemgetter(0)(), lambda: operator.itemgetter(0)([1], [2])),
            *(lambda: functools.reduce(operator.add, 5), lambda: operator.attrgetter("shape")()),
            *(lambda: ()[0], lambda: (1, 2)[5], lambda: torch.Size((x.shape[0], 2.0))),
            lambda: operator.methodcaller("format", self=x.shape[0])("{self}"),
        ):
            try:
                log.append(call())
            except Exception as error:
                log.append(what(error))
        return log, x + 1

    return over(fn)


class Given:
    def __init__(self, given):
        self.given = given

    def __iter__(self):
        return self.given


def _refuse_what_is_no_iterator():
    def fn(x):
        log = []
        for given in (5, None, [1], Given(5), iter([1])):
            for take in (iter, list, enumerate, sum, lambda it: [*it], lambda it: [each for each in it]):
                try:
                    log.append(type(take(Given(given))).__name__)
                except TypeError as error:
                    log.append(str(error))
        return log, x + 1

    return over(fn)


class Keyed:
    def keys(self):
        return ["a", "b"]

    def __getitem__(self, key):
        return key * 2


class Unkeyed:
    def keys(self):
        raise AttributeError("none")


def _unpack_mappings():
    def taking(a=1, **rest):
        return a, rest

    def fn(x):
        log = []
        for given in (5, None, [("a", x)], Keyed(), Unkeyed(), object(), {"a": x}):
            for call in (lambda: taking(**given), lambda: {**given}, lambda: taking(**{1: 2})):
                try:
                    log.append(call())
                except TypeError as error:
                    log.append(str(error).split(" at 0x")[0])
        return log, x + 1

    return over(fn)


programs_of(globals(), "iterators_of_natives")
