"""Programs made to be run wrongly: open numbers that meet, random state, exceptions."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import torch
import torch.nn.functional as F
from capture_world import calls, normal, program
from hostile_worlds import SIZES
from hostile_worlds import nine as _nine
from hostile_worlds import rows as _rows
from hostile_worlds import sizes as _sizes


# ---- numbers left open ------------------------------------------------------------------------------------
@program
def hostile_numbers_that_meet():
    """Two open numbers that are equal in some calls and not in others."""

    def f(x, a, b):
        same = a == b
        y = x[:, : a % 4] if a % 4 else x
        z = x[:, : b % 4] if b % 4 else x
        return (y + z if same else y.sum() - z.sum()), a is b, a - b, x * (a / (b or 1))

    pairs = ((3, 5), (4, 6), (5, 5), (1, 1), (0, 4), (300, 300), (2, 3), (7, 7), (-1, 2))
    return calls(f, *(lambda p=p: (_rows(2), *p) for p in pairs))


@program
def hostile_sizes_that_meet():
    def f(x, y):
        if x.shape[0] == y.shape[0]:
            return x + y
        if x.shape[0] == 1 or y.shape[0] == 1:
            return x * y
        return torch.cat([x, y])

    pairs = ((3, 4), (5, 6), (7, 7), (1, 5), (4, 1), (1, 1), (3, 3), (2, 9), (0, 1))
    return calls(f, *(lambda p=p: (_rows(p[0]), _rows(p[1], 1)) for p in pairs))


@program
def hostile_broadcast_where_a_size_is_one():
    def f(x, y):
        return x + y, torch.where(x > y, x, y), (x * y).sum(0), torch.maximum(x, y.expand_as(x * y))

    pairs = ((3, 3), (4, 4), (5, 5), (1, 4), (4, 1), (1, 1), (6, 6), (0, 0), (0, 1))
    return calls(f, *(lambda p=p: (_rows(p[0]), _rows(p[1], 1)) for p in pairs))


@program
def hostile_big_numbers():
    def f(x, n):
        return x * n, n * n % 7, (x.long() + n).sum(), n << 3, n >> 1, float(n) + 1 - n, -n // 3, n % -5

    numbers = (1, 2, 3, 2**31, 2**53 + 1, 2**62, -(2**40), 0, True)
    return calls(f, *(lambda n=n: (_rows(2), n) for n in numbers))


@program
def hostile_floats_of_every_kind():
    def f(x, s):
        return (
            x * s,
            torch.clamp(x, min=-abs(s)),
            s != s,
            x.masked_fill(x > s, s),
            math.copysign(1, s),
            s + 1 == 1,
        )

    numbers = (1.0, 2.0, 0.5, math.nan, math.inf, -0.0, 0.0, 1e-320, 1e308)
    return calls(f, *(lambda s=s: (_rows(2), s) for s in numbers))


@program
def hostile_kinds_of_numbers_change():
    def f(x, s):
        return x * s, type(s).__name__, x // (s or 1), torch.full((2,), s)

    numbers = (1, 2, 3.0, True, np.float32(2.5), np.int64(4), 5, False, 1.5)
    return calls(f, *(lambda s=s: (_rows(2), s) for s in numbers))


@program
def hostile_negative_slices():
    def f(x, a, b):
        return x[a:b], x[b:], x[:a].sum(0), x[-1 - abs(b) % len(x)], x.narrow(0, abs(a) % len(x), 1)

    bounds = ((0, 3), (1, 4), (2, -1), (-3, -1), (-9, 9), (4, 2), (9, 12), (-1, 1), (0, -12))
    return calls(f, *(lambda p=p: (_rows(6), *p) for p in bounds))


@program
def hostile_lengths_of_strings_and_lists():
    def f(x, text, items):
        y = x * len(text) + sum(items)
        return y[: len(items)], text * 2, items[::-1], f"{len(text):03d}{items}", y.repeat(1, len(items) + 1)

    cases = (
        ("a", [1]),
        ("ab", [1, 2]),
        ("abc", []),
        ("é", [0]),
        ("", [5, 6, 7]),
        ("ab", [2, 1]),
        ("z" * 9, [3] * 4),
    )
    return _nine(f, *(lambda c=c: (_rows(5), c[0], list(c[1])) for c in cases))


@program
def hostile_quotients_of_sizes():
    def f(x):
        n = x.shape[0]
        k = (n + 1) // 2
        y = x[:k].repeat(2, 1)[:n]
        z = F.pad(x, (0, 0, k, n - k))[k : k + n]
        pooled = F.adaptive_avg_pool1d(x.t()[None], k)[0].t()
        return y + z, pooled, x.unfold(0, k, 1).sum(-1), n / k, n % k

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_arange_and_masks_of_open_sizes():
    def f(x, past):
        n = x.shape[0]
        at = torch.arange(past, past + n)
        mask = at[:, None] >= torch.arange(past + n)[None]
        scores = (x @ x.t()).repeat(1, 2)[:, :n].masked_fill(~mask[:, past:], -math.inf)
        return scores.softmax(-1) @ x, mask.sum(), at.float() / (past + 1)

    return _nine(
        f, *(lambda n=n, p=p: (_rows(n), p) for n, p in zip(SIZES, (0, 1, 2, 5, 3, 0, 9, 4, 1), strict=True))
    )


@program
def hostile_steps_of_ranges():
    def f(x, start, stop, step):
        total = x * 0
        for i in range(start, stop, step):
            total = total + x * i
        return total, torch.arange(start, stop, step) if (stop - start) * step > 0 else None

    cases = ((0, 4, 1), (1, 5, 2), (4, 0, -1), (3, 3, 1), (-2, 2, 3), (0, 7, 3), (5, 1, -2))
    return _nine(f, *(lambda c=c: (_rows(2), *c) for c in cases))


# ---- random state -----------------------------------------------------------------------------------------
@program
def hostile_random_in_a_branch():
    def f(x, keep):
        noise = torch.rand_like(x)
        if keep > 2:
            torch.rand(3)
        y = F.dropout(x, 0.5, training=keep % 2 == 0)
        return y + noise, torch.randint(keep + 1, (2,)), torch.randperm(x.shape[0])

    return _nine(
        f, *(lambda n=n, k=k: (_rows(n), k) for n, k in zip(SIZES, (1, 2, 3, 4, 0, 5, 2, 3, 6), strict=True))
    )


@program
def hostile_own_generators():
    made = torch.Generator().manual_seed(5)

    def f(x):
        y = torch.randn(x.shape, generator=made)
        again = torch.Generator().manual_seed(x.shape[0])
        z = torch.empty_like(x).normal_(generator=again)
        x.bernoulli_(0.5, generator=made)
        return y, z, x, made.initial_seed()

    return _sizes(f, lambda n: (_rows(n),), observe=lambda: made.get_state().sum())


@program
def hostile_seed_inside():
    def f(x, seed):
        torch.manual_seed(seed)
        a = torch.rand(2)
        with torch.random.fork_rng():
            torch.manual_seed(seed + 1)
            b = torch.rand(x.shape[0])
        return a, b, torch.rand(1), torch.initial_seed()

    return _nine(f, *(lambda n=n, s=s: (_rows(n), s) for n, s in zip(SIZES, range(9), strict=True)))


@program
def hostile_random_then_error():
    def f(x):
        y = torch.rand(2)
        if x.shape[0] == 5:
            raise ValueError(f"five rows, {x.shape[1]} columns")
        return y, torch.rand(1)

    return _sizes(f, lambda n: (_rows(n),))


# ---- exceptions -------------------------------------------------------------------------------------------
@program
def hostile_error_after_writes():
    log = []

    def f(x, n):
        log.append(n)
        x.add_(1)
        try:
            x[n].mul_(10)
        except IndexError as error:
            x.zero_()
            log.append(str(error))
        finally:
            x.sub_(0.5)
        return x.view(-1)[n]

    return _nine(
        f, *(lambda n=n: (_rows(3), n) for n in (0, 1, 2, 3, -3, -4, 11, 12, 2)), observe=lambda: list(log)
    )


@program
def hostile_errors_of_torch():
    def f(x, y):
        z = x * 2
        try:
            return x @ y
        except RuntimeError:
            return z.sum(), x + 1

    return _nine(
        f, lambda: (_rows(3), normal(4, 2)), lambda: (_rows(3), normal(3, 2)), lambda: (_rows(4), _rows(4))
    )


@program
def hostile_exception_groups_and_notes():
    def f(x, n):
        error = KeyError(n)
        error.add_note(f"note {n}")
        try:
            if n % 2:
                raise ExceptionGroup("two", [error, ValueError(n)])
            raise error
        except* ValueError as group:
            return_value = x * len(group.exceptions)
        except* KeyError:
            return_value = x + n
        return return_value

    return _nine(f, *(lambda n=n: (_rows(2), n) for n in range(9)))


@program
def hostile_return_in_finally():
    def f(x, n):
        y = x + n
        for i in range(3):
            try:
                if i == n % 3:
                    continue
                if n > 5:
                    raise RuntimeError(str(n))
                y = y * 2
            except RuntimeError:
                break
            finally:
                y = y - 1
        else:
            y = y + 100
        return y

    return _nine(f, *(lambda n=n: (_rows(2), n) for n in range(9)))


@program
def hostile_suppressed_and_closed():
    log = []

    class Guard(contextlib.ContextDecorator):
        def __enter__(self):
            log.append("in")
            return self

        def __exit__(self, kind, value, _):
            log.append(kind.__name__ if kind else "out")
            return kind is ZeroDivisionError

    @Guard()
    def f(x, n):
        with contextlib.suppress(KeyError), Guard():
            if n % 4 == 1:
                raise KeyError(n)
            x = x / (1 // (n % 4))
        return x + n

    return _nine(f, *(lambda n=n: (_rows(2), n) for n in range(9)), observe=lambda: list(log))
