"""Softmax and losses of rows longer than a block of a GPU holds: parts are read once for maximum and sum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_gpu_partition import on_gpu, planned, run  # noqa: F401

from ladder.partition.subgraphs import Subgraph

COLUMNS = 70001


def rows(kind: torch.dtype) -> torch.Tensor:
    """Return rows of which some, or a part, are infinite or no numbers."""
    x = (5 * torch.randn(6, COLUMNS, generator=torch.Generator().manual_seed(0))).to(kind)
    x[0, : COLUMNS // 2] = x[1] = -torch.inf
    x[2, 77] = torch.inf
    x[3, 99] = torch.nan
    x[4] = torch.finfo(kind).max
    return x


def shares(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def likelihoods(x: torch.Tensor) -> torch.Tensor:
    return x.log_softmax(-1)


def totals(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(x.float() / 0.7, -1)


PROGRAMS: dict[Callable[..., torch.Tensor], tuple[torch.dtype, int]] = {
    shares: (torch.float64, 3),
    likelihoods: (torch.float32, 3),
    totals: (torch.float16, 2),
}
"""Program -> type of its rows, and kernels."""


def whole_reads(parts: list[Subgraph]) -> int:
    """Return how many kernels read all elements."""
    return sum(any(n.tile.shape[-1] == COLUMNS for n in part.graph.inputs) for part in parts)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_long_rows(program: Callable[..., torch.Tensor]) -> None:
    kind, kernels = PROGRAMS[program]
    x = rows(kind)
    parts = planned(program, x)
    assert [part.kind for part in parts] == ["chain"] * kernels
    assert whole_reads(parts) == kernels - 1  # the last one writes as much, or reads only what parts have
    (name,) = {value for part in parts for value in part.inputs if "arg" in value}
    values = {name: x.numpy()}
    run(parts, values)
    wanted = program(x)
    bound = {torch.float64: 1e-12}.get(kind, 1e-5)
    np.testing.assert_allclose(values[parts[-1].outputs[0]], wanted.numpy(), rtol=bound, atol=bound)


def test_many_rows_are_in_parts_if_no_block_holds_one() -> None:
    def read(rows: int, columns: int) -> list[tuple[int, ...]]:
        parts = planned(shares, torch.empty(rows, columns))
        return [part.graph.tile(part.outputs[0]).shape for part in parts]

    assert len(read(256, 32000)) == 1
    assert read(256, 128256)[0] == (256, 8, 1)
