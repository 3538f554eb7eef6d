"""Random programs of views through `ladder.compile`, many as one function: eager's results to the bit.

``python tests/fuzz_views.py --first 0 --count 10000`` draws a program for each seed, prints every one that
differs, reads outside of a tensor or is refused, and fails if there are any. One seed in `OPEN_EVERY` is also
called with other sizes, which are left open from the second call on. Ranges of seeds may run side by side.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from interpreted import interpret_chains
from view_programs import EXTENTS, ViewProgram, argument, draw

import ladder

TOGETHER = 20
"""Programs that are one function."""

OPEN_EVERY = 20


def check_together(programs: Sequence[ViewProgram], arguments: Sequence[torch.Tensor] = ()) -> None:
    """Compile programs as one function, and compare each result with eager's."""
    given = arguments or [argument(program.shape, program.seed) for program in programs]

    def together(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(program(x) for program, x in zip(programs, values, strict=True))

    compiled = ladder.compile(together)
    with torch.no_grad():
        require_same(compiled(*given), together(*given), programs)
    assert not compiled.refused


def check_open(program: ViewProgram) -> None:
    """Call with other sizes, 0 and 1 among them: the second call leaves open what differs."""
    compiled = ladder.compile(program.__call__)
    for shape in shapes_of(program):
        x = argument(shape, program.seed)
        with torch.no_grad():
            require_same([compiled(x)], [program(x)], [program], f"at {shape}")
    assert not compiled.refused


def require_same(
    got: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor],
    programs: Sequence[ViewProgram],
    where: str = "",
) -> None:
    """Require results to be those of eager, to the bit."""
    for a, b, program in zip(got, want, programs, strict=True):
        assert a.shape == b.shape, f"{program} {where}"
        assert torch.equal(a, b), f"{program} {where}"


def shapes_of(program: ViewProgram) -> list[tuple[int, ...]]:
    """Return shapes of arguments for which eager runs a program, its own first."""
    rng, found = random.Random(program.seed), [program.shape]
    for _ in range(8):
        shape = tuple(rng.choice((0, *EXTENTS)) if rng.random() < 0.6 else e for e in program.shape)
        if shape in found or torch.Size(shape).numel() > 600:
            continue
        try:
            program(argument(shape))
        except (RuntimeError, IndexError):
            continue
        found.append(shape)
    return found[:5]


def faults(seeds: Sequence[int]) -> Iterator[str]:
    """Yield what is wrong with the programs of some seeds."""
    programs = [draw(seed) for seed in seeds]
    try:
        check_together(programs)
    except Exception:
        yield from (fault for program in programs for fault in _faults_alone(program))
    for program in programs:
        if program.seed % OPEN_EVERY == 0:
            yield from _told(program, lambda program=program: check_open(program))  # type: ignore[misc]


def _faults_alone(program: ViewProgram) -> Iterator[str]:
    yield from _told(program, lambda: check_together([program]))


def _told(program: ViewProgram, check: object) -> Iterator[str]:
    try:
        check()  # type: ignore[operator]
    except Exception as error:
        yield f"{program}: {type(error).__name__}: {error}"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python tests/fuzz_views.py", description="random programs of views"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10_000, help="how many seeds")
    options = parser.parse_args()
    start, found = time.monotonic(), 0
    seeds = range(options.first, options.first + options.count)
    with pytest.MonkeyPatch.context() as patch:
        interpret_chains(patch)
        for at in range(0, len(seeds), TOGETHER):
            for fault in faults(seeds[at : at + TOGETHER]):
                found += 1
                print(fault, flush=True)
    used = resource.getrusage(resource.RUSAGE_SELF)
    told = {
        "first": options.first,
        "programs": len(seeds),
        "open": sum(seed % OPEN_EVERY == 0 for seed in seeds),
        "faults": found,
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "megabytes": used.ru_maxrss >> 10,
    }
    print(json.dumps(told))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
