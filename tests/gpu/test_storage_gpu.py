"""Weights that are stored on a GPU, bit for bit as on the CPU: torch lacks operators of some types there."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ladder  # noqa: E402
from ladder.api.grouped_linear import GroupedLinear  # noqa: E402
from tile_types.shards import COLUMNS, ROWS, joined, shard, taken_rows  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

N, K, EXPERTS = 64, 256, 4


def forms(device: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return a drawn matrix of a type, and what is made of it."""
    drawn = torch.randn(EXPERTS * N, K, generator=torch.Generator().manual_seed(3)).to(device)
    whole = ladder.quantize(drawn, name, **options)
    cut = [shard(whole, axis, 1, 4) for axis in (ROWS, COLUMNS)]
    return {
        "whole": whole,
        "rows": cut[0],
        "columns": cut[1],
        "joined": joined([whole, whole]),
        "taken": taken_rows(whole, [3, 0, 77]),
    }


def options_of(name: str) -> dict[str, Any]:
    """Return the first options of a few that the type takes."""
    several = (
        {"group_size": 32},
        {},
        {"group_size": 32, "zero": "integer"},
        {"group_size": 32, "zero": "float"},
    )
    for options in several:
        try:
            ladder.quantize(torch.randn(4, 64), name, **options)
        except ladder.LadderError:
            continue
        return options
    raise AssertionError(name)


@pytest.mark.parametrize("name", ladder.list_types())
def test_every_type_is_stored_as_on_the_cpu(name: str) -> None:
    options = options_of(name)
    here, there = forms("cpu", name, options), forms("cuda", name, options)
    for kind, found in there.items():
        codes = [torch.as_tensor(each.codes()).cpu().long() for each in (found, here[kind])]
        assert torch.equal(*codes), kind
        values = [torch.as_tensor(each.dequantize("float64")).cpu() for each in (found, here[kind])]
        assert torch.equal(*values), kind


@pytest.mark.parametrize(
    "name", ["int3", "int4", "int8", "nf4", "mxfp4", "nvfp4", "fp6_e3m2", "fp6_e2m3", "fp8_e4m3", "fp8_e5m2"]
)
def test_experts_are_quantized_on_the_gpu(name: str) -> None:
    drawn = torch.randn(EXPERTS * N, K, device="cuda")
    whole = ladder.quantize(drawn, name)
    layer = GroupedLinear.from_stack(whole, EXPERTS, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(9, K, device="cuda", dtype=torch.bfloat16)
    found = layer(x, torch.tensor([0, 2, 2, 5, 9], device="cuda", dtype=torch.int32))
    matrices = torch.as_tensor(whole.dequantize("float64")).to("cuda").view(EXPERTS, N, K)
    numbers = torch.tensor([0, 0, 2, 2, 2, 3, 3, 3, 3], device="cuda")
    exact = torch.einsum("tk,tnk->tn", x.double(), matrices[numbers])
    assert float((found.double() - exact).norm() / exact.norm()) <= 4e-3
