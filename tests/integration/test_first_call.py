"""A call on a CPU builds the kernel that it needs, and waits for no other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import ladder
from ladder.runtime import compile as compiling
from ladder.runtime.build import Job, Kernel


@pytest.mark.usefixtures("empty_cache")
def test_a_call_builds_the_kernel_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    build, asked = compiling.find_or_build, list[int]()

    def counted(jobs: Sequence[Job]) -> list[Kernel]:
        asked.append(len(jobs))
        return build(jobs)

    monkeypatch.setattr(compiling, "find_or_build", counted)
    weight = ladder.quantize(torch.randn(48, 72), "int4", group_size=24)
    op = ladder.Matmul(48, 72, "int4", group_size=24)
    packed, exact = op.pack(weight), weight.dequantize("float64").T
    for m, builds in ((0, 0), (1, 1), (1, 1), (300, 2), (300, 2)):
        x = torch.randn(m, 72).half()
        assert torch.allclose(op(x, packed).double(), x.double() @ exact, rtol=1e-2, atol=1e-2)
        assert asked == [1] * builds
