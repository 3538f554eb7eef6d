"""Weights are quantized, packed and unpacked where they are, whatever torch's default device is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import ladder
from ladder.api.problem import gemm_for
from ladder.lower.gpu.proven import packed_layout
from ladder.runtime.packed import PackedWeight, pack
from targets import get_device, host_cpu
from tile_types import get_type

pytestmark = pytest.mark.usefixtures("one_schedule")

OPTIONS = [
    ("int4", {"group_size": 32}),
    ("uint4", {"group_size": 32, "zero": "integer"}),
    ("nf4", {"group_size": 64}),
    ("int8", {}),
    ("mxfp4", {}),
    ("float16", {}),
]


@contextmanager
def default_device(name: str) -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(before if before.type != "cpu" else None)


def packings(weight: torch.Tensor, ttype: str, options: dict[str, object]) -> list[PackedWeight]:
    """Return the weight packed for a CPU and for a GPU."""
    quantized = ladder.quantize(weight, ttype, **options)
    n, k = quantized.shape
    group = {"group_size": min(quantized.block[1], k), "zero": quantized.zero_kind}
    gemm = gemm_for(n, k, get_type(ttype), "float16", output="float16", bias=False, **group)
    return [pack(gemm, get_device(name), quantized) for name in (host_cpu().name, "cuda/sm_90a")]


def same(first: PackedWeight, second: PackedWeight) -> bool:
    pairs = list(zip(first.tensors, second.tensors, strict=True))
    beside = all(a.device == b.device for a, b in pairs)
    return beside and all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize(("ttype", "options"), OPTIONS, ids=[name for name, _ in OPTIONS])
def test_packing_follows_the_weight(ttype: str, options: dict[str, object]) -> None:
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    expected = packings(weight, ttype, options)
    with default_device("meta"):
        found = packings(weight, ttype, options)
    assert all(map(same, found, expected))


def test_codes_of_a_gpu_layout_are_read_where_they_are() -> None:
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    layout = packed_layout(get_type("int4"), "float16")
    with default_device("meta"):
        assert torch.equal(layout.unpack(layout.pack(codes), 64, 128).to(torch.uint8), codes)


def calibrated(model: torch.nn.Module, x: torch.Tensor) -> torch.nn.Module:
    return ladder.quantize_(model, "int4", group_size=32, calibration=[x])


def clipped(model: torch.nn.Module, x: torch.Tensor) -> torch.nn.Module:
    return ladder.quantize_(model, "nf4", group_size=32)


@pytest.mark.costly
@pytest.mark.parametrize("quantize", [calibrated, clipped])
def test_models_are_quantized_and_run_where_they_are(
    quantize: Callable[[torch.nn.Module, torch.Tensor], torch.nn.Module],
) -> None:
    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32)).eval()

    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = quantize(made(), x)(x)
        model = made()
        with default_device("meta"):
            quantize(model, x)
            found = model(x)
            buffers = list(model.buffers())
            assert buffers
            assert {buffer.device.type for buffer in buffers} == {"cpu"}
            model.to(torch.bfloat16)  # packs again
            assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert torch.equal(found, expected)
