"""What is thrown into generators: the contexts that it gets, and where it ends."""

from __future__ import annotations

import contextlib

from capture_world import calls, normal, programs_of


def chain(error):
    """Return an exception and its contexts."""
    found = []
    while error is not None and len(found) < 6:
        found.append(repr(error))
        error = error.__context__
    return found


def plain():
    yield 1


def answers():
    try:
        yield 1
    except ValueError:
        raise TypeError("answer") from None


def handles():
    try:
        raise KeyError("own")
    except KeyError:
        yield 1


def delegates(inner=plain):
    try:
        raise KeyError("outer")
    except KeyError:
        yield from inner()


def goes_on():
    try:
        yield from delegates(answers)
    except TypeError as error:
        yield chain(error)
        raise


def over_a_list():
    yield from [1, 2]


class Asks:
    """An iterator with a `throw` of its own."""

    def __iter__(self):
        return self

    def __next__(self):
        return 1

    def throw(self, *given):
        raise OSError("asked")


def over_an_iterator():
    yield from delegates(Asks)


MAKERS = plain, answers, handles, delegates, goes_on, over_a_list, over_an_iterator
MAKERS += (lambda: delegates(answers), lambda: delegates(handles))


def thrown_into(make, error, outside):
    """Return what a generator gives for an exception, thrown while another one is handled if `outside`."""
    generator, found = make(), []
    next(generator)
    try:
        if outside:
            try:
                raise NameError("handled outside")
            except NameError:
                found.append(generator.throw(error))
        else:
            found.append(generator.throw(error))
        found.append(next(generator))
    except BaseException as left:
        found.append(chain(left))
    return found


def _into_generators():
    def fn(x, outside):
        errors = lambda: (ValueError("v"), StopIteration(3))  # noqa: E731
        return x + 1, [thrown_into(make, error, outside) for make in MAKERS for error in errors()]

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (False, False, True)])


def _with_a_context():
    def fn(x):
        error = ValueError("v")
        error.__context__ = OSError("before")
        return x + 1, [thrown_into(make, error, outside) for make in MAKERS[:4] for outside in (False, True)]

    return calls(fn, *[lambda: (normal(3),)] * 3)


@contextlib.contextmanager
def cleans():
    try:
        raise OSError("before")
    except OSError:
        yield 3


def _into_managers():
    def fn(x):
        try:
            with cleans() as scale:
                x = x * scale
                raise ValueError("within")
        except ValueError as error:
            return x, chain(error)

    return calls(fn, *[lambda: (normal(3),)] * 2)


def _contexts_that_go_round():
    def fn(x):
        first, second = KeyError("first"), ValueError("second")
        try:
            try:
                raise first
            except KeyError:
                raise second
        except ValueError:
            first.__context__ = second
        try:
            try:
                raise second
            except ValueError:
                raise TypeError("last")
        except TypeError as error:
            return x + 1, chain(error)

    return calls(fn, *[lambda: (normal(3),)] * 2)


def ends_recording():
    """Break the graph where no segment can end."""

    def stops():
        class Made:
            pass

        yield Made

    next(stops())


@contextlib.contextmanager
def without_context():
    try:
        yield
    except IndexError:
        error = KeyError("alone")
        try:
            raise error
        finally:
            error.__context__ = None


@contextlib.contextmanager
def stacked():
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_context())
        yield


def _contexts_that_are_taken_away():
    def fn(x, k, stops):
        if stops:
            ends_recording()
        found = []
        for manager in (without_context, stacked):
            try:
                with manager():
                    raise IndexError
            except KeyError as error:
                found.append(chain(error))
        first, second = KeyError("first"), ValueError("second")
        try:
            raise first
        except KeyError as error:
            second.__cause__ = error
        return x * k, found, second.__cause__ is first, second.__suppress_context__, second.__context__

    return calls(fn, *[lambda k=k: (normal(3), k, k > 2) for k in (1, 2, 3, 4, 1)])


class Nothing:
    pass


class Enters:
    def __enter__(self):
        return 3


def _managers_of_the_wrong_kind():
    def fn(x, stops):
        if stops:
            ends_recording()
        for manager in (Nothing(), Enters(), 3):
            try:
                with manager as scale:
                    x = x * scale
            except TypeError as error:
                x = x + len(str(error))
        return x

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (False, False, True)])


async def waits():
    return 3


def over_a_coroutine(coroutine):
    yield from coroutine


def _over_coroutines():
    def fn(x):
        coroutine = waits()
        try:
            return list(over_a_coroutine(coroutine))
        except TypeError as error:
            return x * 2, str(error)
        finally:
            coroutine.close()

    return calls(fn, *[lambda: (normal(3),)] * 2)


programs_of(globals(), "thrown")
