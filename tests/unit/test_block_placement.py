"""Placement in shared memory against brute force: offsets, layouts, barriers."""

from __future__ import annotations

import itertools
import random

import pytest

from ladder.lower.blocks.kernel import levels
from ladder.lower.blocks.layouts import Candidate, Lifetime, allocate, choose, lower_bound
from tile_types.errors import ScheduleError


def height(buffers: dict[str, Lifetime], offsets: dict[str, int]) -> int:
    return max((offsets[name] + buffer.size for name, buffer in buffers.items()), default=0)


def least_height(buffers: dict[str, Lifetime]) -> int:
    """Try every offset up to the sum of sizes."""
    items = list(buffers.values())
    for limit in range(lower_bound(buffers), sum(x.size for x in items) + 1):
        for places in itertools.product(*(range(limit - x.size + 1) for x in items)):
            pairs = itertools.combinations(zip(items, places, strict=True), 2)
            if all(not a.meets(b) or p + a.size <= q or q + b.size <= p for (a, p), (b, q) in pairs):
                return limit
    raise AssertionError("the sum of sizes always suffices")


@pytest.mark.parametrize("seed", range(40))
def test_allocation_is_exact(seed: int) -> None:
    draw = random.Random(seed)
    buffers = {}
    for index in range(draw.randint(1, 5)):
        first = draw.randint(0, 3)
        buffers[str(index)] = Lifetime(draw.randint(1, 4), first, draw.randint(first, 3))
    offsets = allocate(buffers)
    for (a, x), (b, y) in itertools.combinations(buffers.items(), 2):
        assert not x.meets(y) or offsets[a] + x.size <= offsets[b] or offsets[b] + y.size <= offsets[a]
    assert height(buffers, offsets) == least_height(buffers)


def test_allocation_can_exceed_the_bytes_alive() -> None:
    """The bound is not always reached, so that placing by size alone would not be exact."""
    buffers = {
        str(i): Lifetime(*x) for i, x in enumerate([(1, 0, 1), (2, 1, 2), (1, 2, 3), (2, 3, 3), (2, 0, 0)])
    }
    assert height(buffers, allocate(buffers)) == least_height(buffers)


def test_offsets_are_aligned() -> None:
    buffers = {"a": Lifetime(100, 0, 1), "b": Lifetime(1, 1, 2), "c": Lifetime(200, 2, 2)}
    assert all(offset % 128 == 0 for offset in allocate(buffers, 128).values())


def cheapest(candidates: list[Candidate], budget: int) -> tuple[int, int] | None:
    costs = []
    for layouts in itertools.product(*(candidate.options for candidate in candidates)):
        pairs = list(zip(candidates, layouts, strict=True))
        bytes_ = sum(candidate.bytes(layout) for candidate, layout in pairs)
        if bytes_ <= budget:
            costs.append((sum(candidate.cost(layout) for candidate, layout in pairs), bytes_))
    return min(costs, default=None)


@pytest.mark.parametrize("seed", range(20))
def test_layouts_are_the_cheapest_that_fit(seed: int) -> None:
    draw = random.Random(seed)
    candidates = [
        Candidate(
            str(i),
            8 * draw.randint(1, 4),
            draw.choice((2, 4, 5, 6, 8)),
            draw.randint(1, 4),
            draw.randint(1, 9),
        )
        for i in range(draw.randint(1, 5))
    ]
    least = sum(min(map(c.bytes, c.options)) for c in candidates)
    most = sum(max(map(c.bytes, c.options)) for c in candidates)
    budget = draw.randint(least, most)
    chosen = choose(candidates, budget)
    found = [(c.cost(chosen[c.name]), c.bytes(chosen[c.name])) for c in candidates]
    assert tuple(map(sum, zip(*found, strict=True))) == cheapest(candidates, budget)
    with pytest.raises(ScheduleError, match="shared memory"):
        choose(candidates, least - 1)


def barriers(order: tuple[str, ...], operands: dict[str, tuple[str, ...]], shared: set[str]) -> int:
    """Count the barriers that an order needs: one before each reader of what was written since the last."""
    count, written = 0, set()
    for value in order:
        if written & set(operands[value]):
            count, written = count + 1, set()
        if value in shared:
            written.add(value)
    return count


@pytest.mark.parametrize("seed", range(30))
def test_no_order_has_fewer_barriers(seed: int) -> None:
    draw = random.Random(seed)
    names = "abcdef"
    operands = {
        name: tuple(draw.sample(names[:index], min(index, draw.randint(0, 2))))
        for index, name in enumerate(names)
    }
    used = {value for inputs in operands.values() for value in inputs}
    shared = {name for name in used if draw.random() < 0.6}
    orders = (
        order
        for order in itertools.permutations(names)
        if all(order.index(x) < order.index(name) for name in names for x in operands[name])
    )
    assert len(levels(operands, shared)) == min(barriers(order, operands, shared) for order in orders)
