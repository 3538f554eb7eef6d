"""Random programs of views through `ladder.compile`: eager's results to the bit, and nothing read outside.

Their chains are executed as TVM's passes leave them, with every access checked; a few run as compiled, their
arguments between elements that are not numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from interpreted import interpret_chains
from view_programs import EXTENTS, ViewProgram, argument, draw

import ladder

TOGETHER = 20
"""Programs that are one function."""

SEEDS = range(0, 400, TOGETHER)
LONG = range(400, 10_000, TOGETHER)
"""Those of ``--long``."""

OPEN = range(20_000, 20_012)
COMPILED = range(30_000, 30_016)


@pytest.mark.parametrize("seed", SEEDS)
def test_programs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_chains(monkeypatch)
    check_together([draw(seed + number) for number in range(TOGETHER)])


@pytest.mark.usefixtures("long_test")
@pytest.mark.parametrize("seed", LONG)
def test_more_programs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_chains(monkeypatch)
    check_together([draw(seed + number) for number in range(TOGETHER)])


@pytest.mark.parametrize("seed", OPEN)
def test_programs_of_open_sizes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call leaves open what differs from the first; sizes 0 and 1 are among those that follow."""
    interpret_chains(monkeypatch)
    program = draw(seed)
    compiled = ladder.compile(program.__call__)
    for shape in shapes_of(program):
        x = argument(shape, seed)
        with torch.no_grad():
            require_same([compiled(x)], [program(x)], [program], f"at {shape}")
    assert not compiled.refused


def test_compiled_programs() -> None:
    """Through LLVM."""
    programs = [draw(seed) for seed in COMPILED]
    check_together(programs, [surrounded(argument(p.shape, p.seed)) for p in programs])


def check_together(programs: Sequence[ViewProgram], arguments: Sequence[torch.Tensor] = ()) -> None:
    """Compile programs as one function, and compare each result with eager's."""
    given = arguments or [argument(program.shape, program.seed) for program in programs]

    def together(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(program(x) for program, x in zip(programs, values, strict=True))

    compiled = ladder.compile(together)
    with torch.no_grad():
        require_same(compiled(*given), together(*given), programs)
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


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the middle of memory that is not a number."""
    margin = 64
    around = torch.full((x.numel() + 2 * margin,), float("nan"))
    inside = around[margin : margin + x.numel()].view(x.shape)
    return inside.copy_(x)


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
