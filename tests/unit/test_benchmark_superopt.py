"""The choices of `benchmarks.superopt` are legal, and its programs mean what torch computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.superopt import CHOICES, points, short, torch_function
from ladder.lower.blocks import BlockSchedule
from ladder.lower.blocks.analysis import BlockProgram
from ladder.lower.blocks.geometry import BlockGeometry
from targets import get_device


@pytest.mark.parametrize("name", points())
def test_choices_are_legal(name: str) -> None:
    device, labels = get_device("cuda/sm_90a"), set()
    for choice in CHOICES[name]:
        tiles, fields, _ = choice
        schedule = BlockSchedule(**fields)
        geo = BlockGeometry(BlockProgram.of(points()[name].case(tiles).block), device, schedule)
        assert geo.shared_bytes <= device.shared_per_block
        assert geo.least_registers <= 192
        labels.add(short(choice))
    assert len(labels) == len(CHOICES[name])


SMALL = {
    "rmsnorm_matmul b=1": ((2, 32, 16), (16, 16)),
    "gated_mlp b=1": ((4, 32, 16), (16, 16)),
    "lora": ((4, 32, 16, 16), (16, 16)),
    "gqa b=1": ((2, 8, 16, 32), (8, 16)),
    "qknorm_attention b=1": ((2, 8, 16, 32), (8, 16)),
    "ntrans b=1": ((4, 32), ()),
}


@pytest.mark.parametrize("name", SMALL)
def test_block_graphs_mean_what_torch_computes(name: str) -> None:
    from dataclasses import replace

    sizes, tiles = SMALL[name]
    point = replace(points()[name], sizes=sizes)
    case = point.case(tiles)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n.tile.known_shape, generator=generator).double() for n in case.graph.inputs]
    exact = torch_function(point)(*inputs).numpy()
    assert np.allclose(case.meaning(*(x.numpy() for x in inputs)), exact, rtol=1e-9)
