"""Random programs of views through `ladder.compile`: eager's results to the bit, and nothing read outside.

Their chains are executed as TVM's passes leave them, with every access checked; a few run as compiled, their
arguments between elements that are not numbers. ``python tests/fuzz_views.py`` tries other seeds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fuzz_views import TOGETHER, check_open, check_together, faults
from interpreted import interpret_chains
from torch.nn import functional as F
from view_programs import ViewProgram, argument, draw

import ladder
from ladder.lower import builder
from ladder.lower.chain import nest

SEEDS = range(0, 1000, TOGETHER)
LONG = range(1000, 10_000, TOGETHER)
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
    interpret_chains(monkeypatch)
    check_open(draw(seed))


def test_compiled_programs() -> None:
    """Through LLVM."""
    programs = [draw(seed) for seed in COMPILED]
    check_together(programs, [surrounded(argument(p.shape, p.seed)) for p in programs])


def test_a_program_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are one function, the one that is wrong."""
    interpret_chains(monkeypatch)
    assert not list(faults([1, 2]))
    right, called = ViewProgram.__call__, []

    def other(program: ViewProgram, x: torch.Tensor) -> torch.Tensor:
        called.append(program.seed)
        first = called.count(2) % 2 == 1
        return right(program, x) + (1 if program.seed == 2 and first else 0)

    monkeypatch.setattr(ViewProgram, "__call__", other)
    (told,) = faults([1, 2])
    assert told.startswith("seed 2, ")


def within_one_axis(x: torch.Tensor) -> torch.Tensor:
    rows = torch.nn.functional.pad(torch.stack([x, x + 1, x]), (3, 2))
    return torch.stack([rows, rows * 2, rows])


@pytest.mark.parametrize("most", [8, 3])
def test_joins_within_joins_are_as_many_branches_as_pieces(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where that is more than allowed, what is left is decided element by element."""
    made: list[object] = []
    either = builder.either
    monkeypatch.setattr(builder, "either", lambda *given: (made.append(given), either(*given)))
    monkeypatch.setattr(nest, "MOST_BRANCHES", min(most, nest.MOST_BRANCHES))
    interpret_chains(monkeypatch)
    x = argument((1, 13))
    assert torch.equal(ladder.compile(within_one_axis)(x), within_one_axis(x))
    assert len(made) == most


def bordered_twice(x: torch.Tensor) -> torch.Tensor:
    return F.pad(F.pad(x, (0, -13, -1, 2)).repeat(1, 3), (1, 3, 2, -1))


def joined_with_nothing(x: torch.Tensor) -> torch.Tensor:
    nothing = x[:, 13:].repeat(3, 1).reshape(3, -1)
    return torch.cat([nothing.repeat_interleave(2, 1), x.repeat(3, 1), nothing], 1).flatten() + 1


def summed_of_nothing(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x[:, 13:].unflatten(1, (0, 4)).sum(2), (2, 5)) + x[:, :7]


@pytest.mark.parametrize("program", [bordered_twice, joined_with_nothing, summed_of_nothing])
def test_values_without_elements_are_not_read(
    program: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret_chains(monkeypatch)
    x = argument((1, 13))
    compiled = ladder.compile(program)
    assert torch.equal(compiled(x), program(x))
    assert not compiled.refused


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the middle of memory that is not a number."""
    margin = 64
    around = torch.full((x.numel() + 2 * margin,), float("nan"))
    inside = around[margin : margin + x.numel()].view(x.shape)
    return inside.copy_(x)
