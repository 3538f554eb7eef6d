"""Floats divided down and toward 0, and what that leaves, on GPUs: kernels, exact for huge quotients too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_column_reductions import run_parts

import ladder
from ladder.frontend import importer
from ladder.frontend.torch_fx import import_fx
from ladder.partition import partition
from ladder.runtime.model.prepared import simplified
from targets import get_device

H200 = get_device("cuda/sm_90a")
NAN, INF = math.nan, math.inf
SPECIAL = (
    *(NAN, INF, -INF, 0.0, -0.0, 2.0**-126, 3.4e38, -3.4e38, 1.0, -1.0, 0.5, -2.5, 1e-20, -3e19, 65504.0),
    *(1e-5, 12.5, 7.0, 6.2831855, -3.0),
)


def on_gpu(
    program: Any, inputs: Sequence[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """Return what kernels without calls of torch give on the simulator."""
    found: list[Any] = []

    def backend(module: Any, examples: Any) -> Any:
        found.append(simplified(import_fx(module, examples), H200))
        return module

    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(importer.Importer, "on_cpu", never, raising=False)
    with torch.no_grad():
        ladder.compile(program, backend=backend)(*inputs)
    graph = found[0].graph
    parts = partition(graph, device=H200)
    assert sorted({part.kind for part in parts}) in (["chain"], ["chain", "view"])
    return list(run_parts(graph, parts, list(inputs)))


def program(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Of tensors, and of numbers, which 16 bits round."""
    rests = torch.fmod(x, y), torch.remainder(x, y), torch.fmod(x, 2.1), x % 6, torch.remainder(x, -math.tau)
    whole = torch.div(x, y, rounding_mode="trunc")
    floors = (torch.floor_divide(x, y), x // 0.3) if x.dtype == torch.float32 else ()
    return torch.stack([*rests, whole, *floors])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_divisions_of_floats(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.tensor(SPECIAL).to(dtype)
    x, y = values.repeat_interleave(len(values)), values.repeat(len(values))
    (got,) = on_gpu(program, [x, y], monkeypatch)
    want = program(x, y)
    with np.errstate(all="ignore"):
        want[0] = torch.from_numpy(np.fmod(x.numpy(), y.numpy()))
    lost = want[1].isnan() & ~want[0].isnan()  # torch's vectors give NaN for the largest quotients
    assert lost.sum() < 20
    want[1][lost] = got[1][lost].to(dtype)
    numbers = ~want.isnan()
    assert torch.equal(numbers, ~got.isnan())
    assert torch.equal(got.to(dtype)[numbers], want[numbers])
    assert torch.equal(got.signbit()[numbers], want.signbit()[numbers])


def test_hues_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def hues(x: torch.Tensor) -> torch.Tensor:
        red, green, blue = x.unbind(1)
        most, spread = x.amax(1), x.amax(1) - x.amin(1) + 1e-8
        of_red = ((green - blue) / spread) % 6
        return torch.where(most == red, of_red, torch.where(most == green, blue - red, red - green) / spread)

    x = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    (got,) = on_gpu(hues, [x], monkeypatch)
    torch.testing.assert_close(got.float(), hues(x), rtol=1e-5, atol=1e-6)


def hashed(x: torch.Tensor) -> torch.Tensor:
    most = torch.iinfo(x.dtype).max
    return torch.stack([x % (most - 3), x // (most // 2), x % most, x * 97 % 101])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_integers_are_divided_by_any_number_of_their_type(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.min, limits.min + 1, -1, 0, 1, 7, 100, limits.max - 1, limits.max], dtype=dtype)
    (got,) = on_gpu(hashed, [x], monkeypatch)
    assert torch.equal(got, hashed(x).double())


def powers(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x**n for n in (2, 3, 4, 5, 6, 7, 8, -1, -2)])


def test_whole_powers_are_products(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([*SPECIAL, 1.1, -0.7])
    got = on_gpu(powers, [x], monkeypatch)[0].float()
    want = powers(x.double()).float()
    assert torch.equal(got.isnan(), want.isnan())
    numbers = ~want.isnan() & (want.abs() >= 2.0**-126)
    assert torch.equal(got.signbit()[numbers], want.signbit()[numbers])
    torch.testing.assert_close(got[numbers], want[numbers], rtol=1e-6, atol=0.0)
