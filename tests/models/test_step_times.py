"""Times of the steps of a plan, and of what torch takes for the same nodes."""

from __future__ import annotations

import torch

import ladder
from benchmarks.zoo_speed import dearest


def test_products_of_packed_weights_have_no_time_of_torch() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Softmax(-1)).eval()
    fast = ladder.compile(ladder.quantize_(model, "int4", group_size=32))
    x = torch.randn(3, 64)
    with torch.no_grad():
        fast(input=x)
        steps = dearest(fast, {"input": x}, 9, rounds=1)
    kinds = {step["kind"]: "torch_us" in step for step in steps}
    assert kinds == {"gemm": False, "chain": True}
