"""Random programs of views, joins, borders, repeats, gathers and pools over tensors of few elements.

Extents are odd: 0, 1, primes, and those around the width of a vector. Values are whole numbers, so that
results are those of eager to the bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

Step = Callable[[list[torch.Tensor]], torch.Tensor]

EXTENTS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 19)

MOST = 1500
"""Elements of a value: each is computed by an interpreter."""


@dataclass
class ViewProgram:
    """Steps, each a function of all values before it.

    Parameters
    ----------
    seed
        Decides the program.
    shape
        Of the argument it was drawn with.
    """

    seed: int
    shape: tuple[int, ...] = ()
    steps: list[Step] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        values = [x]
        for step in self.steps:
            values.append(step(values))
        return values[-1]

    def __str__(self) -> str:
        return f"seed {self.seed}, {list(self.shape)}: {'; '.join(self.names)}"


def argument(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Return different whole numbers, some of them negative."""
    count = int(torch.Size(shape).numel())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return (order - count // 3).float().reshape(tuple(shape))


def draw(seed: int) -> ViewProgram:
    """Return a program."""
    rng = random.Random(seed)
    while True:
        shape = tuple(rng.choice(EXTENTS) for _ in range(rng.choice([1, 2, 2, 3, 3, 4])))
        if 0 < int(torch.Size(shape).numel()) <= MOST // 3:
            break
    program = ViewProgram(seed, shape)
    values = [argument(shape)]
    for _ in range(rng.randint(2, 7)):
        at = len(values) - 1 if rng.random() < 0.8 else rng.randrange(len(values))
        name = rng.choice(list(MAKERS))
        made = MAKERS[name](rng, values, at)
        if made is None:
            continue
        text, step = made
        value = step(values)
        if value.numel() <= MOST and value.dim() <= 5:
            values.append(value)
            program.steps.append(step)
            program.names.append(f"v{len(values) - 1} = {name} v{at} {text} {list(value.shape)}")
    if not program.steps:
        return draw(seed + 7919)
    return program


Made = tuple[str, Step] | None


def _axis(rng: random.Random, x: torch.Tensor) -> int:
    return rng.randrange(x.dim())


def _sliced(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    axis = _axis(rng, values[at])
    extent = values[at].shape[axis]
    choices = [None, 0, 1, 2, extent // 2, extent - 1, extent, extent + 3, -1, -2, -extent, -extent - 2]
    begin, end, step = rng.choice(choices), rng.choice(choices), rng.choice([None, 1, 1, 2, 3])
    cut = (slice(None),) * axis + (slice(begin, end, step),)
    return f"axis {axis} {begin}:{end}:{step}", lambda v: v[at][cut]


def _joined(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    axis = _axis(rng, values[at])
    rest = [e for a, e in enumerate(values[at].shape) if a != axis]
    fits = [
        n
        for n, v in enumerate(values)
        if v.dim() == values[at].dim() and [e for a, e in enumerate(v.shape) if a != axis] == rest
    ]
    parts = [at, *rng.choices(fits, k=rng.choice([1, 1, 2]))]
    rng.shuffle(parts)
    cuts = [rng.choice([None, None, 1, 2]) for _ in parts]
    index = [(slice(None),) * axis + (slice(None, cut),) for cut in cuts]
    return (
        f"{parts} cut {cuts} axis {axis}",
        lambda v: torch.cat([v[part][i] for part, i in zip(parts, index, strict=True)], axis),
    )


def _bordered(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    axes = rng.randint(1, min(2, values[at].dim()))
    sizes = [rng.choice([0, 0, 1, 2, 3, -1]) for _ in range(2 * axes)]
    shape = values[at].shape[::-1]
    if any(shape[a] + sizes[2 * a] + sizes[2 * a + 1] < 0 for a in range(axes)):
        return None
    if any(shape[a] + min(sizes[2 * a], 0) + min(sizes[2 * a + 1], 0) < 0 for a in range(axes)):
        return None
    value = rng.choice([0.0, 0.0, 5.0])
    return f"{sizes} {value}", lambda v: F.pad(v[at], sizes, value=value)


def _each_repeated(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    axis, times = _axis(rng, values[at]), rng.choice([2, 3, 4])
    return f"axis {axis} times {times}", lambda v: v[at].repeat_interleave(times, dim=axis)


def _tiled(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    times = [rng.choice([1, 1, 2, 3]) for _ in values[at].shape]
    return f"{times}", lambda v: v[at].repeat(*times)


def _rolled(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    axis, by = _axis(rng, values[at]), rng.choice([1, 2, -1, -3])
    return f"axis {axis} by {by}", lambda v: v[at].roll(by, axis)


def _flipped(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    axis = _axis(rng, values[at])
    return f"axis {axis}", lambda v: v[at].flip(axis)


def _selected(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    axis = _axis(rng, values[at])
    extent = values[at].shape[axis]
    if extent == 0:
        return None
    ids = [rng.randrange(extent) for _ in range(rng.choice([1, 2, 3, 5]))]
    numbers = torch.tensor(ids)
    return f"axis {axis} {ids}", lambda v: v[at].index_select(axis, numbers)


def _taken(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    if values[at].dim() < 2:
        return None
    axis = _axis(rng, values[at])
    extent = values[at].shape[axis]
    if extent == 0:
        return None
    number = rng.choice([0, extent - 1, -1, -extent])
    return f"axis {axis} {number}", lambda v: v[at].select(axis, number)


def _stacked(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    fits = [n for n, v in enumerate(values) if v.shape == values[at].shape]
    parts, axis = [at, *rng.choices(fits, k=rng.choice([1, 2]))], rng.randint(0, values[at].dim())
    return f"{parts} axis {axis}", lambda v: torch.stack([v[part] for part in parts], axis)


def _expanded(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    axis, count = rng.randint(0, values[at].dim()), rng.choice([1, 2, 3])

    def step(v: list[torch.Tensor]) -> torch.Tensor:
        x = v[at].unsqueeze(axis)
        return x.expand(*(count if a == axis else e for a, e in enumerate(x.shape)))

    return f"axis {axis} to {count}", step


def _turned(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    order = list(range(values[at].dim()))
    rng.shuffle(order)
    return f"{order}", lambda v: v[at].permute(order)


def _merged(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    if values[at].dim() < 2 or values[at].numel() == 0:
        return None
    first = rng.randrange(values[at].dim() - 1)
    return f"axes {first}, {first + 1}", lambda v: v[at].flatten(first, first + 1)


def _split(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    axis = _axis(rng, values[at])
    extent = values[at].shape[axis]
    divisors = [d for d in range(2, extent) if extent % d == 0]
    if not divisors:
        return None
    sizes = (-1, rng.choice(divisors)) if rng.random() < 0.5 else (rng.choice(divisors), -1)
    return f"axis {axis} {sizes}", lambda v: v[at].unflatten(axis, sizes)


def _windowed(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    axis, size, step = _axis(rng, values[at]), rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    if values[at].shape[axis] < size:
        return None
    return f"axis {axis} size {size} step {step}", lambda v: v[at].unfold(axis, size, step)


def _pooled(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    if values[at].dim() not in (3, 4) or 0 in values[at].shape or min(values[at].shape[-2:]) < 3:
        return None
    size, step, border = rng.choice([(2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 1, 0)])
    return f"{size} {step} {border}", lambda v: F.max_pool2d(v[at], size, step, border)


def _summed(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    axis, keep = _axis(rng, values[at]), rng.random() < 0.6
    if not keep and values[at].dim() < 2:
        return None
    return f"axis {axis} {keep}", lambda v: v[at].sum(axis, keepdim=keep)


def _largest(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    axis = _axis(rng, values[at])
    if values[at].shape[axis] == 0:
        return None
    return f"axis {axis}", lambda v: v[at] - v[at].amax(axis, keepdim=True)


def _computed(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    kinds: dict[str, Step] = {
        "neg": lambda v: -v[at],
        "relu": lambda v: v[at].relu(),
        "half": lambda v: v[at] * 0.5,
        "twice": lambda v: v[at] + v[at],
        "clamp": lambda v: v[at].clamp(-20, 20),
    }
    kind = rng.choice(list(kinds))
    return kind, kinds[kind]


def _added(rng: random.Random, values: list[torch.Tensor], at: int) -> Made:
    fits = [n for n, v in enumerate(values) if v.shape == values[at].shape]
    other = rng.choice(fits)
    return f"v{other}", lambda v: v[at] + v[other]


MAKERS: dict[str, Callable[[random.Random, list[torch.Tensor], int], Made]] = {
    "slice": _sliced,
    "cat": _joined,
    "pad": _bordered,
    "repeat_interleave": _each_repeated,
    "repeat": _tiled,
    "roll": _rolled,
    "flip": _flipped,
    "index_select": _selected,
    "select": _taken,
    "stack": _stacked,
    "expand": _expanded,
    "permute": _turned,
    "flatten": _merged,
    "unflatten": _split,
    "unfold": _windowed,
    "max_pool2d": _pooled,
    "sum": _summed,
    "minus_amax": _largest,
    "elementwise": _computed,
    "add": _added,
}
"""Operator -> draws one of it on a value: what to print, and the step; None where it does not apply."""
