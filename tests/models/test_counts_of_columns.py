"""Means of what masks leave: counts are made beside the sums, in one kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from chain_targets import run_chain
from test_gpu_partition import on_gpu, planned

assert on_gpu

Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.unsqueeze(-1).to(x.dtype)
    return (x * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


def largest_share(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask[..., None]).sum(1) / mask.to(x.dtype).amax(1, keepdim=True)


def images(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    tokens, mask = x.reshape(x.shape[0], 4, -1, x.shape[-1]), mask.reshape(x.shape[0], 4, -1, 1).to(x.dtype)
    return (tokens * mask).sum((1, 2)) / (mask.sum((1, 2)) + 1)


def spread(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weight = mask.to(x.dtype)
    total = weight.sum(1, keepdim=True)
    first = (x * weight[..., None]).sum(1) / total
    return (x * x * weight[..., None]).sum(1) / total - first * first


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
@pytest.mark.parametrize("program", [mean, largest_share, images, spread])
def test_one_kernel_counts_and_sums(program: Program, target: str) -> None:
    x, mask = torch.randn(3, 40, 24), (torch.rand(3, 40) < 0.6).long()
    mask[1] = 0
    x[0, 3, 4], x[2, 1, 1] = torch.nan, torch.inf
    (part,) = planned(program, x, mask)
    given = [mask if tile.tile.ttype.name == "int64" else x for tile in part.graph.inputs]
    shapes = (node.tile.known_shape for node in part.graph.inputs)
    given = [tensor.reshape(shape) for tensor, shape in zip(given, shapes, strict=True)]
    (found,) = run_chain(part.graph, given, target)
    exact = program(x.double(), mask)
    torch.testing.assert_close(
        found.double().reshape(exact.shape), exact, rtol=1e-5, atol=1e-6, equal_nan=True
    )


def test_counts_that_others_read_are_apart() -> None:
    def both(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = mask.sum(1, keepdim=True)
        return (x * mask[..., None]).sum(1) / count, count

    assert len(planned(both, torch.randn(3, 40, 24), torch.rand(3, 40))) == 2
