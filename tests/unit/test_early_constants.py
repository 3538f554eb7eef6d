"""Constants that kernels load early: a call notices that one may have been written since the call before."""

from __future__ import annotations

import torch

from ladder.ir.gemm import Gemm
from ladder.runtime.fused import Written
from ladder.runtime.packed import pack
from targets import get_device
from tile_types import quantize


def test_tensors() -> None:
    written, x, w = Written([1]), torch.randn(2, 8), torch.randn(8, 8)
    assert written.since([x, w])
    assert not written.since([x, w])
    assert not written.since([x.add_(1), w])  # no constant
    w.view(-1)[0] = 1
    assert written.since([x, w])
    assert not written.since([x, w])
    assert written.since([x, w.view(8, 8)])  # maybe another tensor at the same address
    assert Written([0, 1]).since([x, w])


def test_tensors_that_go() -> None:
    """A new tensor may lie where another lay, with as many writes."""
    written = Written([0])
    for _ in range(3):
        assert written.since([torch.zeros(4)])


def test_tensors_without_versions() -> None:
    with torch.inference_mode():
        w = torch.randn(8)
    written = Written([0])
    assert all(written.since([w]) for _ in range(3))


def test_packed_weights() -> None:
    gemm = Gemm(64, 64, "int4", group_size=32)
    weight = pack(gemm, get_device("cuda/sm_90a"), quantize(torch.randn(64, 64), "int4", group_size=32))
    written = Written([0])
    assert written.since([weight])
    assert not written.since([weight])
    weight.tensors[-1].mul_(2)
    assert written.since([weight])
    assert not written.since([weight])
